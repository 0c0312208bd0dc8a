"""lm-evaluation-harness: a megalite model gets the same numbers as the harness's own class gets from transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.conversion.open import load_model
from megalite.generation.generate import Chain
from megalite.generation.likelihood import Scored, likelihoods
from megalite.topology.topology import Topology
from tests.e2e.programs import REPOSITORY, TORCHRUN
from tests.support.ranks import RankContext, run_ranks

TASK = REPOSITORY / "examples" / "lm_eval"
REQUESTS = [
    Scored([5, 9, 30, 7, 8, 11], 2),
    Scored([3, 4], 1),
    Scored([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
    Scored([8, 8, 1], 1),
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers writes it; its tokenizer was trained on the task's words."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("models") / "llama"
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    end = "<|endoftext|>"
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=[end], initial_alphabet=alphabet)
    bpe.train_from_iterator([(TASK / "python_endings.jsonl").read_text()], trainer)
    chats = {"chat_template": CHAT_TEMPLATE}
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end, **chats).save_pretrained(folder)
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=300, max_position_embeddings=16, bos_token_id=None, eos_token_id=0, **sizes)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # so that its most likely tokens are clear
    model.save_pretrained(folder)
    return folder


def scored(context: RankContext, folder: str, **axes: int) -> list[tuple[float, bool]]:
    topology = context.topology(**axes)
    model = load_model(Path(folder), topology, needs_tokenizer=False, log=lambda line: None)
    return likelihoods(Chain(model.stage, topology), REQUESTS, topology, batch_size=3)


@pytest.mark.parametrize("axes", [{"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_likelihoods_do_not_depend_on_the_layout(llama: Path, axes: dict[str, int]) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(llama).eval()
    expected = []
    for one in REQUESTS:
        ids = torch.tensor([list(one.tokens)])
        with torch.no_grad():
            scores = model(ids).logits[0].log_softmax(dim=-1)[:-1][-one.last :]
        labels = ids[0, -one.last :]
        total = float(scores.gather(1, labels[:, None]).sum())
        expected.append((pytest.approx(total, rel=1e-5), bool((scores.argmax(dim=-1) == labels).all())))
    for rank in run_ranks(4, scored, str(llama), **axes):
        assert rank == expected
    assert (
        likelihoods(
            Chain(load_model(llama, Topology.solo(), log=lambda line: None).stage), [], Topology.solo(), batch_size=2
        )
        == []
    )


TEXT = "The value of the argument is a sequence. Raises ValueError if the name is not a list. import sys"


def test_harness_numbers_equal_those_of_transformers(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likelihoods, also of long texts, accuracy and greedy text, by the harness's class for transformers and by megalite's."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("lm_eval.models.huggingface", exc_type=ImportError)  # needs the extra lm_eval[hf]
    from lm_eval.api.instance import Instance
    from lm_eval.tasks import TaskManager

    from megalite.cli.lm_eval import MegaliteLM

    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = {}
    for name, where in (("hf", f"pretrained={llama}"), ("megalite", f"load={llama}")):
        result = lm_eval.simple_evaluate(
            model=name,
            model_args=where,
            tasks=["python_endings"],
            task_manager=TaskManager(include_path=str(TASK)),
            batch_size=4,
            device="cpu",
            bootstrap_iters=0,
        )
        samples = [[float(one[0][0]) for one in sample["resps"]] for sample in result["samples"]["python_endings"]]
        found[name] = (result["results"]["python_endings"]["acc,none"], samples)
    assert found["megalite"][0] == found["hf"][0]
    for ours, theirs in zip(found["megalite"][1], found["hf"][1], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)

    def ask(model: Any, kind: str, *args: Any) -> Any:
        return getattr(model, kind)([Instance(kind, {}, args, 0)])[0]

    for wrong, said in (({"tp": 0}, "tp is 0"), ({"dtype": "bfloat16"}, "dtype is bfloat16; give one of .*bf16")):
        with pytest.raises(ConfigError, match=said):
            MegaliteLM(load=str(llama), **wrong)
    us = MegaliteLM(load=str(llama))
    them = lm_eval.api.registry.get_model("hf")(pretrained=str(llama), device="cpu")
    assert ask(us, "loglikelihood", "", TEXT[:20]) == pytest.approx(ask(them, "loglikelihood", "", TEXT[:20]), rel=1e-5)
    assert len(us.tok_encode(TEXT)) > us.max_length == 16
    assert ask(us, "loglikelihood_rolling", TEXT) == pytest.approx(ask(them, "loglikelihood_rolling", TEXT), rel=1e-5)
    how = {"until": ["\n", "zzz"], "max_gen_toks": 8, "do_sample": False}
    texts = [ask(model, "generate_until", "The value of", dict(how)) for model in (us, them)]
    assert texts[0] == texts[1] and texts[0]
    chat = [{"role": "user", "content": "is it é?"}, {"role": "assistant", "content": "it is "}]
    for said, ends in ((chat[:1], True), (chat, True), (chat, False)):
        assert us.apply_chat_template(said, ends) == them.apply_chat_template(said, ends)
    assert us.chat_template(chat_template=True) == CHAT_TEMPLATE


def test_command_line_on_two_ranks(llama: Path, tmp_path: Path) -> None:
    """As in examples/lm_eval: one table, one file of results."""
    pytest.importorskip("lm_eval")
    command = [*TORCHRUN, "--nproc-per-node", "2", "-m", "megalite.cli.lm_eval", "--model", "megalite"]
    command += ["--model_args", f"load={llama},tp=2", "--tasks", "python_endings", "--include_path", str(TASK)]
    command += ["--device", "cpu", "--output_path", str(tmp_path / "out")]
    offline = {"HF_HOME": str(tmp_path), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=REPOSITORY,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("|python_endings|") == 1
    (report,) = (tmp_path / "out").rglob("results*.json")
    assert 0.0 <= json.loads(report.read_text())["results"]["python_endings"]["acc,none"] <= 1.0
