"""The table of settings agrees with the dataclasses."""

from megalite.config.describe import replace, sectioned, sections, settings, values_of
from megalite.config.run import RunConfig


def test_each_setting_is_described() -> None:
    assert list(sections()) == [
        *("model", "parallel", "data_parallel", "optimizer", "data", "training", "compute", "checkpoint"),
        "logging",
    ]
    for setting in settings().values():
        assert setting.help.endswith("."), setting.name
        assert setting.flags[0] == "--" + setting.name.replace("_", "-")
        assert not setting.choices or setting.default is None or setting.default in setting.choices


def test_types_and_defaults() -> None:
    tp, path, layers, lr = (settings()[name] for name in ("tp", "data_path", "pipeline_layers", "lr"))
    assert (tp.section, tp.type, tp.is_list, tp.optional, tp.default, tp.basic) == (
        "parallel",
        int,
        False,
        False,
        1,
        True,
    )
    assert "--tensor-model-parallel-size" in tp.flags
    assert (path.type, path.is_list, path.optional, path.default) == (str, True, False, [])
    assert (layers.type, layers.is_list, layers.optional) == (int, True, True)
    assert lr.type is float
    assert settings()["precision"].choices == ("fp32", "bf16", "fp16", "fp64")
    assert settings()["hidden_size"].help == "Width h of the residual stream."


def test_no_two_settings_share_a_flag() -> None:
    flags = [flag for setting in settings().values() for flag in setting.flags]
    assert len(flags) == len(set(flags))


def test_flat_and_sectioned_values() -> None:
    config = replace(RunConfig(), tp=4, lr=0.1, num_layers=8)
    assert (config.parallel.tp, config.optimizer.lr, config.model.num_layers) == (4, 0.1, 8)
    assert RunConfig().parallel.tp == 1
    assert values_of(config)["lr"] == 0.1
    assert list(values_of(config)) == list(settings())
    assert sectioned(config)["parallel"]["tp"] == 4


def test_words_set_a_value() -> None:
    found = [
        settings()[name].words(value)
        for name, value in {"tie_embeddings": False, "lr": 0.00012345678901234, "tp": 2}.items()
    ]
    assert found == [["--no-tie-embeddings"], ["--lr", "0.00012345678901234"], ["--tp", "2"]]
