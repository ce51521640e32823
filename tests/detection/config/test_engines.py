"""Interface of the engines."""

from detection.config.engines import Engine, find_engine

INTERFACE = {name for name in (*vars(Engine), *Engine.__annotations__) if not name.startswith("_")}


def test_an_engine_has_the_interface(engine):
    assert {"default_config", "check_config", "build_model", "to_model", "loggers"} < INTERFACE
    module = find_engine(engine)
    assert {name for name in INTERFACE if hasattr(module, name)} == INTERFACE
