"""A setting of some strategies, optimizers or compressions is refused with all others.

The owners come from its help ("local-sgd, diloco: ..."), not from the table that the rules use."""

import ast
from pathlib import Path

import pytest

from megalite.config.describe import replace, settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.optimizer import ONEBIT_OPTIMIZERS, OPTIMIZERS
from megalite.config.parallel import COMPRESSIONS
from megalite.config.rules import rule
from megalite.config.run import RunConfig
from megalite.config.strategies import STRATEGIES
from megalite.config.validate import validate

CHOOSERS = {
    "dp_strategy": STRATEGIES.builtin,
    "optimizer": OPTIMIZERS.builtin,
    "grad_compression": tuple(name for name in COMPRESSIONS if name != "none"),
}
SHORT = {"1-bit optimizers": ONEBIT_OPTIMIZERS}
VALUES = {"freeze_step": 3, "grad_compression": "topk", "shard_gradients": True, "stochastic_rounding": True}
"""Values for settings that are off by default."""
BESIDE = {
    "stochastic_rounding": {"exp_avg_dtype": "bf16"},
    "fp8_param_gather": {"fp8": True, "precision": "bf16", "num_layers": 3},
}  # settings that these need to have an effect


def owners(help_text: str) -> dict[str, frozenset[str]]:
    """Return chooser -> the values named before the help's colon; empty if other text is there."""
    head, colon, _ = help_text.partition(": ")
    names = {name for word in head.split(", ") for name in SHORT.get(word, (word,))}
    return {chooser: frozenset(names) for chooser, known in CHOOSERS.items() if colon and names <= set(known)}


OWNED = [
    (name, chooser, named) for name, setting in settings().items() for chooser, named in owners(setting.help).items()
]


def verdict(name: str, chooser: str, value: str) -> str:
    """Return the errors of `validate` for a setting; empty if it is accepted."""
    default = settings()[name].default
    changes = {name: VALUES.get(name, True if default is False else default)}
    beside = {"lr_decay_style": "constant", **BESIDE.get(name, {})}
    config = replace(RunConfig(), **{**changes, **beside, chooser: value})
    try:
        validate(config, 2, frozenset({name}))
    except ConfigError as error:
        return str(error)
    value_asked = values_of(config)[name]
    assert value_asked is not None and value_asked is not False, "the test covers no setting"
    return ""


@pytest.mark.parametrize(("name", "chooser", "named"), OWNED, ids=[f"{row[0]}" for row in OWNED])
def test_setting_is_refused_unless_its_owner_is_chosen(name: str, chooser: str, named: frozenset[str]) -> None:
    for value in (*CHOOSERS[chooser], *(("none",) if chooser == "grad_compression" else ())):
        says = verdict(name, chooser, value)
        if value in named:
            assert not says
        else:
            assert says.startswith(name) and f" has no effect with {chooser} {value}; use --" in says, value


def test_most_settings_name_their_owners() -> None:
    """With differently worded help, the test above would check nothing."""
    of = {chooser: {name for name, other, _ in OWNED if other == chooser} for chooser in CHOOSERS}
    assert {"overlap_param_gather", "sync_interval", "sync_warmup_steps", "gossip_graph"} <= of["dp_strategy"]
    assert {"sgd_momentum", "lamb_min_coeff", "freeze_step", "exp_avg_dtype"} <= of["optimizer"]
    assert of["grad_compression"] == {"topk_density", "powersgd_rank"}
    assert [len(names) for names in of.values()] == [19, 21, 2]


def test_rule_texts_name_existing_settings() -> None:
    """An unknown name in braces would appear literally in an error."""
    texts = [
        node.value
        for path in Path(rule.__file__).parent.glob("[!_]*.py")
        if path.name != "rule.py"  # examples in its text
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    found = {name for text in texts for _, names in rule._NAMED.findall(text) for name in names.split("|")}
    assert len(found) > 100
    assert {name for name in found if not hasattr(rule.Settings, name) and name not in settings()} == set()
