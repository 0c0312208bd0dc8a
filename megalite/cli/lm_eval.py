"""Run lm-evaluation-harness on a model: `python -m megalite.cli.lm_eval --model megalite --model_args load=FOLDER`.

The package lm_eval is optional. Under torchrun the model is split over the ranks, all ranks run the same tasks, and the
harness reports on rank 0."""

from argparse import Namespace
from typing import Any

import lm_eval.models  # noqa: F401  # registers the harness' models, which it skips after another registration
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megalite.cli.generate import layout_of, open_model
from megalite.config.errors import ConfigError
from megalite.conversion.native import DTYPES
from megalite.generation.continuation import GrowingText, Sampling
from megalite.generation.generate import Chain, generate_batch
from megalite.generation.likelihood import Scored, likelihoods
from megalite.tokenizers.chat import require_chat_template
from megalite.topology.topology import Launch, Topology, start_distributed, stop_distributed

_MAX_NEW_TOKENS = 256
_TIMEOUT_MINUTES = 30.0


@register_model("megalite")
class MegaliteLM(TemplateLM):
    """A checkpoint of any layout, or a Hugging Face folder, on tp x pp ranks. Further ranks are replicas that share the
    requests.

    The arguments, given in --model_args, are those of `megalite evaluate`, and `max_gen_toks`: maximum number of new
    tokens if a task sets none."""

    def __init__(
        self,
        load: str,
        *,
        tp: int = 1,
        pp: int = 1,
        dtype: str | None = None,
        ckpt_step: int | None = None,
        tokenizer_model: str | None = None,
        tiktoken_pattern: str | None = None,
        max_gen_toks: int = _MAX_NEW_TOKENS,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdecimal():
            raise ConfigError(f"batch_size is {batch_size}; give a number, e.g. 8")
        if min(tp, pp) < 1:
            raise ConfigError(f"tp is {tp} and pp {pp}; give numbers of at least 1")
        if dtype not in (None, *DTYPES):
            raise ConfigError(f"dtype is {dtype}; give one of {', '.join(DTYPES)}")
        launch, axes = Launch.from_environment(), {"tp": tp, "pp": pp, "cp": 1, "ep": 1}
        tokenizer = {"tokenizer_model": tokenizer_model, "tiktoken_pattern": tiktoken_pattern}
        flags = Namespace(load=load, ckpt_step=ckpt_step, weights="trained", dtype=dtype, **axes, **tokenizer)
        layout = layout_of(flags, launch.world_size, data_parallel=True)
        self._device = launch.device(device or "auto")
        start_distributed(launch, self._device, backend="auto", timeout_minutes=_TIMEOUT_MINUTES)
        self._topology = Topology.create(
            layout, rank=launch.rank, device=self._device, timeout_minutes=_TIMEOUT_MINUTES
        )
        self._model = open_model(flags, self._topology)
        assert self._model.tokenizer is not None
        self._tokenizer, self._max_new_tokens = self._model.tokenizer, int(max_gen_toks)
        self._chain = Chain(self._model.stage, self._topology)
        self._batch_size = int(batch_size)

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod

    @property
    def max_length(self) -> int:
        """Context length in tokens."""
        return self._model.seq_length

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.fingerprint()

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the source of the tokenizer's template, which the harness stores with the results."""
        if isinstance(chat_template, str):
            raise ConfigError(
                f"--apply_chat_template {chat_template}: give no name; the tokenizer's default template is used"
            )
        return require_chat_template(self._tokenizer, "--apply_chat_template").source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt for a chat. Without `add_generation_prompt` it ends inside the last message."""
        template = require_chat_template(self._tokenizer, "--apply_chat_template")
        return template.prompt(chat_history, begun=not add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(string)]

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        scored = []
        for _, context, continuation in requests:
            last = min(len(continuation), self.max_length)
            scored.append(Scored([*context, *continuation][-self.max_length - 1 :], last))
        found = likelihoods(self._chain, scored, self._topology, batch_size=self._batch_size)
        for (words, _, _), result in zip(requests, found, strict=True):
            if words is not None:
                self.cache_hook.add_partial("loglikelihood", words, result)
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        windows, owners = [], []
        for index, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        texts = []
        for context, options in (request.args for request in requests):
            until, is_sampled = options.get("until", ()), bool(options.get("do_sample"))
            stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
            limit = min(int(options.get("max_gen_toks", self._max_new_tokens)), self.max_length - 1)
            sampling = Sampling(
                max_new_tokens=limit,
                temperature=float(options.get("temperature", 1.0)) if is_sampled else 0.0,
                top_k=options.get("top_k") if is_sampled else None,
                top_p=options.get("top_p") if is_sampled else None,
            )
            prompt = (self.tok_encode(context) or [self.prefix_token_id])[limit - self.max_length :]

            def text_of(ids: Any, stops: list[str] = stops) -> GrowingText:
                return GrowingText(self._tokenizer.decode, ids, stops)

            for last in generate_batch(
                self._chain, [prompt], sampling, stop_token_ids=self._model.stop_token_ids, make_text=text_of
            ):
                done = last
            assert done.text is not None
            texts.append(done.text.text)
            self.cache_hook.add_partial("generate_until", (context, options), texts[-1])
        return texts


def main() -> None:
    """Run the harness' command line with `megalite` among its models."""
    agreed = False
    try:
        cli_evaluate()
        agreed = True
    finally:
        stop_distributed(agreed=agreed)


if __name__ == "__main__":
    main()
