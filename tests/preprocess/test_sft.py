"""Fine-tuning examples: transformers' ids and masks, and the text of responses."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import IndexedDataset
from megalite.preprocess.job import PreprocessJob
from megalite.preprocess.run import job_facts, plan, preprocess
from megalite.tokenizers.base import ByteLevelTokenizer
from megalite.tokenizers.build import build_tokenizer
from tests.preprocess.jobs import Stop, stop_after

BYTES = DataConfig(tokenizer_type="ByteLevelTokenizer")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
FORGETFUL = (
    "{% for message in messages %}{% if loop.last or message['role'] == 'user' %}{{ message['content'] }}{% endif %}|"
    "{% endfor %}"
)
CHATS: list[list[dict[str, Any]]] = [
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Which colour has the sky on a clear day?"},
        {"role": "assistant", "content": "Blue, where the air scatters the light — naïvely speaking 🌤."},
        {"role": "user", "content": "And at night?"},
        {"role": "assistant", "content": "Black."},
    ],
    [{"role": "user", "content": "\n2 + 2?\n"}, {"role": "assistant", "content": "\n4"}],
]


def tokenizer_folder(folder: Path, template: str | None, *, file: bool = False) -> Path:
    """A byte-level BPE trained on the chats, in Hugging Face's format."""
    folder.mkdir()
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([message["content"] for chat in CHATS for message in chat], trainer)
    trained.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    if template is not None and file:
        (folder / "chat_template.jinja").write_text(template)
    elif template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_examples(path: Path, *examples: object) -> Path:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return path


def job(folder: Path, *inputs: Path, tokenizer: DataConfig = BYTES, **more: Any) -> PreprocessJob:
    return PreprocessJob(
        inputs=tuple(map(str, inputs)), output_prefix=str(folder / "out"), tokenizer=tokenizer, sft=True, **more
    )


def pairs(folder: Path) -> list[list[tuple[int, int]]]:
    """Return (id, 1 for a response) of each token of each example."""
    tokens, mask = (IndexedDataset(folder / f"out_{name}_document") for name in ("sft", "sft_mask"))
    return [list(zip(a.tolist(), b.tolist(), strict=True)) for a, b in zip(tokens, mask, strict=True)]


def said(folder: Path, tokenizer: Any) -> list[str]:
    return [tokenizer.decode([token for token, is_said in example if is_said]) for example in pairs(folder)]


def test_prompt_and_response(tmp_path: Path) -> None:
    examples = write_examples(
        tmp_path / "e.jsonl", {"prompt": "ab", "response": "cd"}, {"prompt": "", "completion": "e", "id": 7}
    )
    progress = preprocess(job(tmp_path, examples))
    assert progress.outputs == [str(tmp_path / "out_sft_document"), str(tmp_path / "out_sft_mask_document")]
    eod = ByteLevelTokenizer.eod
    assert pairs(tmp_path) == [[(97, 0), (98, 0), (99, 1), (100, 1), (eod, 1)], [(101, 1), (eod, 1)]]


@pytest.mark.parametrize("file", [False, True])
def test_chats_with_generation_marks_equal_transformers(tmp_path: Path, file: bool) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tokenizer_folder(tmp_path / "tok", MARKED, file=file)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    examples = write_examples(tmp_path / "e.jsonl", *({"messages": chat} for chat in CHATS))
    preprocess(job(tmp_path, examples, tokenizer=DataConfig(tokenizer_model=str(folder))))
    for chat, ours in zip(CHATS, pairs(tmp_path), strict=True):
        wanted = theirs.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
        assert ours == list(zip(wanted["input_ids"], wanted["assistant_masks"], strict=True))


def test_chats_without_generation_marks_train_on_the_rest(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tokenizer_folder(tmp_path / "tok", CHATML)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    examples = write_examples(tmp_path / "e.jsonl", *({"messages": chat} for chat in CHATS))
    preprocess(job(tmp_path, examples, tokenizer=DataConfig(tokenizer_model=str(folder))))
    for chat, ours in zip(CHATS, pairs(tmp_path), strict=True):
        assert [token for token, _ in ours] == theirs.apply_chat_template(chat, return_dict=False)
        answers = [message["content"] for message in chat if message["role"] == "assistant"]
        text = theirs.decode([token for token, is_said in ours if is_said])
        assert text == "".join(f"{answer}<|im_end|>\n" for answer in answers)


def test_bad_examples_are_named(tmp_path: Path) -> None:
    good = {"prompt": "a", "response": "b"}
    examples = write_examples(
        tmp_path / "e.jsonl",
        good,
        {"prompt": "a"},
        {"prompt": 3, "response": "b"},
        {"prompt": "a", "response": ""},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "assistant", "content": 5}]},
        {"messages": "a"},
        [1],
        {"prompt": "a", "response": "\ud800"},
    )
    progress = preprocess(job(tmp_path, examples))
    assert progress.documents == 1
    wanted = ["neither 'prompt' and 'response' nor 'messages' (there are 'prompt')", "a string under 'prompt'"]
    wanted += [
        "empty text under 'response'",
        "no message has the role assistant",
        "a string under 'content', got a number",
    ]
    wanted += ["list of objects", "expected a JSON object, got an array", "half of a surrogate pair"]
    assert len(progress.faults) == len(wanted)
    for number, (fault, reason) in enumerate(zip(progress.faults, wanted, strict=True), 2):
        assert fault.startswith(f"{examples}:{number}: ") and reason in fault


def test_messages_without_a_template_are_an_error(tmp_path: Path) -> None:
    examples = write_examples(tmp_path / "e.jsonl", {"messages": CHATS[0]})
    bare = DataConfig(tokenizer_model=str(tokenizer_folder(tmp_path / "tok", None)))
    for tokenizer, name in ((BYTES, "ByteLevelTokenizer"), (bare, "HuggingFaceTokenizer")):
        for run in (preprocess, plan):
            with pytest.raises(
                ConfigError, match=rf"needs a chat template, and the tokenizer \({name}\) has none; give"
            ):
                run(job(tmp_path, examples, tokenizer=tokenizer))


def test_templates_without_locatable_answers_are_errors(tmp_path: Path) -> None:
    examples = write_examples(
        tmp_path / "e.jsonl", {"messages": CHATS[0]}, {"messages": CHATS[1][1:]}, {"messages": CHATS[1]}
    )
    for name, template, reason in (
        ("forgetful", FORGETFUL, "renders message 2 differently if others follow"),
        ("refusing", "{{ raise_exception('no system') }}", "refuses the messages: no system"),
        ("dated", "{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
    ):
        tokenizer = DataConfig(tokenizer_model=str(tokenizer_folder(tmp_path / name, template)))
        try:
            faults = preprocess(job(tmp_path / f"of-{name}", examples, tokenizer=tokenizer)).faults
        except ConfigError as error:
            faults = [str(error)]
        assert reason in faults[0]
    garbled = DataConfig(tokenizer_model=str(tokenizer_folder(tmp_path / "garbled", "{% for %}")))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: the chat template is not one"):
        preprocess(job(tmp_path, examples, tokenizer=garbled))


def test_changed_template_is_another_job(tmp_path: Path) -> None:
    examples = write_examples(tmp_path / "e.jsonl", {"messages": CHATS[0]})
    facts = []
    for name, template in (("a", CHATML), ("b", MARKED), ("c", CHATML)):
        tokenizer = DataConfig(tokenizer_model=str(tokenizer_folder(tmp_path / name, template)))
        built = build_tokenizer(tokenizer, None)
        assert built is not None
        facts.append(job_facts(job(tmp_path, examples, tokenizer=tokenizer), built))
    assert facts[0] == facts[2] != facts[1]


def test_parquet_and_text_cannot_be_examples(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"a\.txt: fine-tuning examples must be lines of JSON; use \.jsonl"):
        preprocess(job(tmp_path, tmp_path / "a.txt"))


def test_stopped_job_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    examples = write_examples(
        tmp_path / "e.jsonl", *({"prompt": f"{i}", "response": "b" * (i % 9)} for i in range(1, 99))
    )
    small = {"piece_bytes": 500, "checkpoint_seconds": 0.0}
    preprocess(job(tmp_path / "whole", examples, **small))
    with pytest.raises(Stop):
        preprocess(job(tmp_path / "cut", examples, **small), stop_after(40))
    resumed = preprocess(job(tmp_path / "cut", examples, **small))
    assert resumed.notice.startswith("resuming after")
    for name in ("sft", "sft_mask"):
        for suffix in (".bin", ".idx", ".json"):
            ours, whole = (tmp_path / run / f"out_{name}_document{suffix}" for run in ("cut", "whole"))
            assert ours.read_bytes() == whole.read_bytes()
