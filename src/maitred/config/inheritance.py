"""Settings that stand in one place and hold in others too, unless these say otherwise."""

from maitred.config.nodes import ConfigNode, merge


def with_inherited(root: ConfigNode) -> ConfigNode:
    """The merged layers, with the settings of `engine` in every `models.NAME.engine` that does not say otherwise.

    Each keeps the origin that it was written at. Only models with a `path` have an engine; what is not well-formed is
    left for the walker to report.
    """
    sections = root.value
    if not isinstance(sections, dict):
        return root
    engine, models = sections.get("engine"), sections.get("models")
    if engine is None or models is None or not isinstance(models.value, dict):
        return root
    named = {name: _inheriting(model, engine) for name, model in models.value.items()}
    return ConfigNode({**sections, "models": ConfigNode(named, models.origin)}, root.origin)


def _inheriting(model: ConfigNode, engine: ConfigNode) -> ConfigNode:
    if not isinstance(model.value, dict) or "path" not in model.value:
        return model
    own = model.value.get("engine")
    return ConfigNode({**model.value, "engine": engine if own is None else merge(engine, own)}, model.origin)
