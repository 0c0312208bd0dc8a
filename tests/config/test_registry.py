"""Registries: import by name, registration by users, errors for unknown names."""

from typing import Any

import pytest

from megalite.config.compute import KERNELS
from megalite.config.errors import ConfigError
from megalite.config.optimizer import OPTIMIZERS
from megalite.config.registry import Registry


def test_user_registration() -> None:
    registry: Registry[type] = Registry("thing", {"a": "fractions:Fraction"})

    @registry.register("mine")
    class Mine:
        pass

    assert registry.get("mine") is Mine
    assert registry.get("a").__name__ == "Fraction"
    assert tuple(registry) == ("a", "mine") and registry.builtin == ("a",)
    assert registry.name_of(Mine) == registry.name_of("mine") == "mine"
    with pytest.raises(ConfigError, match="thing mine exists already"):
        registry.register("mine")(dict)
    with pytest.raises(ConfigError, match="thing a exists already"):
        registry.register("a")(Mine)
    with pytest.raises(ConfigError, match=r"thing: dict is not registered; decorate it .* or give one of a, mine"):
        registry.name_of(dict)
    with pytest.raises(ConfigError, match=r"thing late is registered with the wrong facts: .*'bytes'"):
        registry.register("late", bytes=4)(Mine)
    with pytest.raises(ConfigError, match=r"thing is 'other'; it must be one of a, mine"):
        registry.get("other")


@pytest.mark.parametrize(
    ("registry", "facts", "says"),
    [
        (OPTIMIZERS, {"states": "momentum"}, r"optimizer it .* states is the text 'momentum'; write .*\('momentum',\)"),
        (KERNELS, {"dtypes": ("fp32",)}, r"kernels it .* dtypes is \('fp32',\); name some of float64, float32"),
        (KERNELS, {"dtypes": "float32"}, r"kernels it .* dtypes is 'float32'; name some of"),
    ],
)
def test_wrong_facts_are_refused_at_registration(registry: Registry[Any], facts: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        registry.register("it", **facts)(object())


def test_redefinition_in_a_notebook_replaces_the_entry() -> None:
    registry: Registry[type] = Registry("thing")

    def cell() -> type:
        @registry.register("mine")
        class Mine:
            pass

        return Mine

    first, second = cell(), cell()
    assert registry.get("mine") is second is not first
