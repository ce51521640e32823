"""Lookup in fvcore's registries with errors for users.

What is registered is a function (or class) whose name is the value of the key that chooses it, and
which builds a component from the configuration.
"""

from typing import Any

from fvcore.common.registry import Registry

from moco.common.errors import UserError


def lookup(registry: Registry, name: str, key: str) -> Any:
    """Return the object that is registered as `name`.

    Args:
        registry: Where to look.
        name: What the user chose.
        key: The key or flag that chose it, for the message.

    Raises:
        UserError: Nothing of this name is registered; the message lists the choices.
    """
    if name not in registry:
        choices = ", ".join(sorted(each for each, _ in registry))
        raise UserError(f"{key}: got {name!r}, expected one of {choices}")
    return registry.get(name)
