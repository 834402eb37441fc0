"""``python -m tests.support.suite.compiled_kernels``: compiles the kernels of an engine, which numba keeps."""


def build_small_engine(**settings: int) -> None:
    """Lets a small engine load the kernels of all, or compile them."""
    from maitred.config.tree import BUNDLED_MODEL
    from maitred.core.flow import ServiceWeights
    from maitred.engine.assembly import build
    from maitred.engine.config import EngineConfig

    build(BUNDLED_MODEL, EngineConfig(kv_memory_bytes=64 << 20, **settings), ServiceWeights())


if __name__ == "__main__":
    build_small_engine()
