"""Lookup in fvcore's registries with errors for users.

Each entry is a function or class that builds a component from the configuration; its name is the
value of the key that selects it.
"""

from typing import Any

from fvcore.common.registry import Registry

from moco.common.errors import UserError


def lookup(registry: Registry, name: str, key: str) -> Any:
    """Return the object registered as `name`.

    Args:
        registry: Registry to search.
        name: Name chosen by the user.
        key: The key or flag that chose it, for the message.

    Raises:
        UserError: If the name is not registered; the message lists the choices.
    """
    if name not in registry:
        choices = ", ".join(sorted(each for each, _ in registry))
        raise UserError(f"{key}: got {name!r}, expected one of {choices}")
    return registry.get(name)
