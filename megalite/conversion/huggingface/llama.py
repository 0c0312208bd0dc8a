"""Map Llama and the families that differ from it in a few features: their config.json, tensor names and shapes."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.config_json import LAYER_KINDS, SCALINGS, ModelFile, read_rope, write_rope, written
from megalite.conversion.huggingface.experts import ExpertKeys
from megalite.conversion.weights import View, WeightPiece, first_rows, part_at, whole
from megalite.models.shapes import WORD

_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}

_SAME = (
    ("num_layers", "num_hidden_layers", "layers"),
    ("hidden_size", "hidden_size", "integer"),
    ("num_attention_heads", "num_attention_heads", "integer"),
    ("vocab_size", "vocab_size", "integer"),
    ("tie_embeddings", "tie_word_embeddings", "flag", False),
    ("init_method_std", "initializer_range", "number", 0.02),
)


@dataclass(frozen=True)
class Family:
    """An architecture of transformers: its config.json, tensor names and shapes."""

    name: str  # model_type
    architecture: str
    _: KW_ONLY
    whole_heads: bool = False  # num_attention_heads must divide hidden_size
    mtp: bool = False  # MTP layers may follow the others
    buffers: ClassVar[re.Pattern[str]]  # names of tensors in old files that are not weights: masks, frequencies

    def read(self, file: ModelFile) -> tuple[ModelConfig, int]:
        """Read config.json. Return the model config and its maximum sequence length."""
        raise NotImplementedError

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        """Return the config.json of a model, without the settings that it cannot express."""
        raise NotImplementedError

    def pieces(self, model: ModelConfig, present: Collection[str] | None) -> Iterator[WeightPiece]:
        """Yield every tensor of the architecture, in the order of ours. `present`: the tensor names in the files, which
        determine the variant; None when writing."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LlamaLike(Family):
    """A Llama-like architecture: its features, and the defaults of transformers' configuration class for missing keys."""

    buffers = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

    max_positions: int
    norm_epsilon: float = 1e-6
    rotary_base: float = 1e4
    key_value_heads: int | None = None  # None: as many as query heads
    head_size: int | None = None  # None: hidden_size / num_attention_heads
    linear_biases: bool = False  # attention_bias and mlp_bias exist
    attention_bias: bool = False  # attention_bias exists, mlp_bias does not
    # Query, key and value have a bias: a fixed value, or (key, default).
    qkv_bias: bool | tuple[str, bool] = False
    scalings: tuple[str, ...] = SCALINGS  # rope_type
    rope: Mapping[str, Any] | None = None  # default of rope_parameters
    partial_rotary: float | None = None  # default of partial_rotary_factor; None: RoPE rotates whole heads
    interleaved: bool = False  # RoPE rotates pairs of adjacent channels
    qk_norm: bool | str = False  # a fixed value, or the name of a key with default False
    # Default of sliding_window; `none`: no window; `switched`: there is one if use_sliding_window is true.
    window: int | str | None = "none"
    mixed: bool = False  # layer_types may select the layers with the window
    # Without layer_types the layers from max_window_layers (with this default) on have the window, or all but every n-th.
    window_from: int | None = None
    full_every: int | None = None
    pattern_key: str = ""  # key of full_every
    activation: tuple[str, str] = ("hidden_act", "silu")  # key and default
    activations: Mapping[str, str] = field(default_factory=lambda: _ACTIVATIONS)  # their name -> ours
    attention_dropout: float = 0.0  # default
    tied: bool = False  # default of tie_word_embeddings
    fixed: Mapping[str, Any] = field(default_factory=dict)  # settings of all models of the family
    only: Mapping[str, Any] = field(default_factory=dict)  # keys with one supported value
    experts: ExpertKeys | None = None
    fused_qkv: bool = False  # query, key and value are one tensor
    # Names of two tensors if gate and up projection are one, and the other is the down projection.
    fused_mlp: tuple[str, str] | None = None
    # Names of the norms after attention, before the MLP and after it, if the branches have norms after them.
    sandwich: tuple[str, str, str] = ("post_attention", "pre_feedforward", "post_feedforward")

    def read(self, file: ModelFile) -> tuple[ModelConfig, int]:
        positions = file.integer("max_position_embeddings", self.max_positions)
        return file.model(seq_length=positions, **self._settings(file, positions)), positions

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        file.require(self.only)
        if file.values.get("rope_parameters") is None and file.values.get("rope_scaling") is None:
            file = ModelFile({**file.values, "rope_parameters": self.rope}, file.where)
        settings = file.settings(_SAME)
        heads = settings["num_attention_heads"]
        # Files of models without a dense MLP may lack its width.
        width = None if self.experts is None or self.experts.dense is not None else self.experts.width
        settings |= {
            "num_query_groups": file.optional_integer("num_key_value_heads", self.key_value_heads) or heads,
            "kv_channels": file.optional_integer("head_dim", self.head_size),
            "ffn_hidden_size": file.integer("intermediate_size", width),
            "max_position_embeddings": positions,
            "normalization": "RMSNorm",
            "norm_epsilon": file.epsilon("rms_norm_eps", self.norm_epsilon),
            "activation": file.activation(*self.activation, self.activations),
            "attention_dropout": file.number("attention_dropout", self.attention_dropout),
            "tie_embeddings": file.flag("tie_word_embeddings", self.tied),
            "add_bias_linear": self._read_biases(file),
            "add_qkv_bias": self.qkv_bias if isinstance(self.qkv_bias, bool) else file.flag(*self.qkv_bias),
            "rotary_interleaved": self.interleaved,
            "qk_norm": self.qk_norm if isinstance(self.qk_norm, bool) else file.flag(self.qk_norm, False),
            **self._read_window(file),
            **self.fixed,
        }
        settings |= read_rope(file, self.rotary_base, positions, kinds=self.scalings, partial=self.partial_rotary)
        if self.experts is not None:
            settings |= self.experts.read(file)
        return settings

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        values: dict[str, Any] = {
            **written(model, _SAME),
            "num_key_value_heads": model.query_groups,
            "head_dim": model.head_size,
            "intermediate_size": (
                model.expert_ffn_size if self.experts is not None and self.experts.width is None else model.ffn_size
            ),
            "max_position_embeddings": model.max_position_embeddings or seq_length,
            "rms_norm_eps": model.norm_epsilon,
            self.activation[0]: next(
                (theirs for theirs, ours in self.activations.items() if ours == model.activation), self.activation[1]
            ),
            "attention_dropout": model.attention_dropout,
            **write_rope(model),
        }
        if model.rope_scaling == "dynamic":  # the base grows for longer sequences
            values["max_position_embeddings"] = model.rope_original_max_positions
        if self.attention_bias or self.linear_biases:
            values["attention_bias"] = self.linear_biases and model.add_bias_linear
        if self.linear_biases:
            values["mlp_bias"] = model.add_bias_linear
        if not isinstance(self.qkv_bias, bool):
            values[self.qkv_bias[0]] = model.add_qkv_bias
        if isinstance(self.qk_norm, str):
            values[self.qk_norm] = model.qk_norm
        if self.partial_rotary is not None:
            values["partial_rotary_factor"] = model.rotary_percent
        kinds = layer_kinds(model)
        if self.window == "switched":
            values["use_sliding_window"] = model.sliding_window is not None
        if self.window_from is not None:
            values["max_window_layers"] = kinds.index(LAYER_KINDS[True]) if LAYER_KINDS[True] in kinds else 0
        if self.full_every is not None or (self.mixed and len(set(kinds)) > 1):
            values["layer_types"] = kinds
        if self.window != "none":
            values["sliding_window"] = model.sliding_window
        if self.mtp:
            values["num_nextn_predict_layers"] = model.mtp_num_layers
        if self.experts is not None:
            values |= self.experts.write(model)
        return values

    def _read_biases(self, file: ModelFile) -> bool:
        """Return whether all linear layers have biases. megalite has biases in all, none, or only qkv (Qwen2)."""
        attention = (self.linear_biases or self.attention_bias) and file.flag("attention_bias", False)
        mlp = self.linear_biases and file.flag("mlp_bias", False)
        if attention != mlp:
            both = f" and mlp_bias {str(mlp).lower()}" if self.linear_biases else ""
            raise file.fault(
                f"attention_bias is {str(attention).lower()}{both}; all linear layers or none must have biases"
            )
        return attention

    def _read_window(self, file: ModelFile) -> dict[str, Any]:
        layers, window = file.layers("num_hidden_layers"), None
        if not isinstance(self.window, str):
            window = file.optional_integer("sliding_window", self.window)
        elif self.window == "switched" and file.flag("use_sliding_window", False):
            window = file.optional_integer("sliding_window", 4096)
        kinds, windows = file.values.get("layer_types"), []
        if kinds is None and window is not None:
            windows = self._windows(file, layers)
        elif kinds is not None:
            wanted = {"full_attention"} if window is None else set(LAYER_KINDS) if self.mixed else {"sliding_attention"}
            if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in wanted for kind in kinds):
                raise file.fault(
                    f"layer_types is not {' or '.join(sorted(wanted))} for each of {layers} layers; with "
                    f"{'no window' if window is None else f'a window of {window}'} nothing else is supported"
                )
            windows = [kind == "sliding_attention" for kind in kinds]
        if window is None or not any(windows):
            return {"sliding_window": None}
        return {"sliding_window": window, "window_attn_skip_freq": layers_without(windows, listed=0)}

    def _windows(self, file: ModelFile, layers: int) -> list[bool]:
        """Return which layers have the window if layer_types is missing."""
        if self.window_from is not None:
            first = file.values.get("max_window_layers", self.window_from)
            if type(first) is not int or first < 0:
                raise file.fault(f"max_window_layers is {str(first)[:60]!r}; it must be a whole number of at least 0")
            return [index >= first for index in range(layers)]
        every = file.integer(self.pattern_key, self.full_every) if self.pattern_key else self.full_every
        return [every is None or (index + 1) % every != 0 for index in range(layers)]

    def pieces(self, model: ModelConfig, present: Collection[str] | None) -> Iterator[WeightPiece]:
        assert model.vocab_size is not None
        h = model.hidden_size
        rows, vocabulary = (model.vocab_size, h), first_rows(model.vocab_size)
        word, head = "model.embed_tokens.weight", "lm_head.weight"
        if model.tie_embeddings and present is not None and word not in present and head in present:
            word = head  # the writer stored the tied tensor under this name
        yield WeightPiece(word, WORD, rows, vocabulary)
        for i in range(model.mtp_layers.stop if self.mtp else model.num_layers):
            there, here = f"model.layers.{i}", f"layers.{i}"
            if i in model.mtp_layers:
                yield from _mtp_pieces(model, there, here, write=present is None)
            if model.pre_norms:
                yield WeightPiece(f"{there}.input_layernorm.weight", f"{here}.attention_norm.weight", (h,))
            yield from self.mixer_pieces(model, i, there, f"{here}.attention")
            if model.post_norms:
                yield WeightPiece(
                    f"{there}.{self.sandwich[0]}_layernorm.weight", f"{here}.attention_post_norm.weight", (h,)
                )
            if model.pre_norms:
                name = self.sandwich[1] if model.post_norms else "post_attention"
                yield WeightPiece(f"{there}.{name}_layernorm.weight", f"{here}.mlp_norm.weight", (h,))
            if model.is_moe_layer(i):
                yield from (self.experts or ExpertKeys()).pieces(model, there, f"{here}.moe", present)
            elif self.fused_mlp is not None:
                yield from _fused_mlp(model, there, f"{here}.mlp", self.fused_mlp)
            else:
                yield from mlp_pieces(model, f"{there}.mlp", f"{here}.mlp")
            if model.post_norms:
                yield WeightPiece(f"{there}.{self.sandwich[2]}_layernorm.weight", f"{here}.mlp_post_norm.weight", (h,))
        yield WeightPiece("model.norm.weight", "final_norm.weight", (h,))
        if not model.tie_embeddings:
            yield WeightPiece(head, "head.weight", rows, vocabulary)

    def mixer_pieces(self, model: ModelConfig, index: int, layer: str, here: str) -> Iterator[WeightPiece]:
        """Yield the tensors of a layer's attention."""
        yield from self.attention_pieces(model, f"{layer}.self_attn", here)

    def attention_pieces(self, model: ModelConfig, there: str, here: str) -> Iterator[WeightPiece]:
        h, d, groups, width = model.hidden_size, model.head_size, model.query_groups, model.group_heads
        queries, key = model.num_attention_heads // groups, width - 2
        # Ranges of the query heads (with their gates), the key and the value in each of our groups of rows.
        parts = {"q": (0, key), "k": (key, key + 1), "v": (key + 1, width)}

        def rows(first: int, last: int) -> View:
            # Each of their heads has its query and then its gate.
            gated: View = lambda part: part.unflatten(1, (2, queries)).transpose(1, 2)  # noqa: E731
            order = gated if last - first > queries else whole
            return lambda ours: order(ours.unflatten(0, (groups, width, d))[:, first:last])

        if model.softmax_type == "learnable":
            yield WeightPiece(f"{there}.sinks", f"{here}.sinks", (model.num_attention_heads,))
        kinds = ("weight", "bias") if model.add_qkv_bias or model.add_bias_linear else ("weight",)
        for kind in kinds:
            if self.fused_qkv:
                size = groups * width * d
                views = [rows(first, last) for first, last in parts.values()]
                shape = (size, h) if kind == "weight" else (size,)
                yield WeightPiece(f"{there}.qkv_proj.{kind}", f"{here}.qkv.{kind}", shape, views[0], tuple(views[1:]))
                continue
            for name, (first, last) in parts.items():
                size = groups * (last - first) * d
                shape = (size, h) if kind == "weight" else (size,)
                yield WeightPiece(f"{there}.{name}_proj.{kind}", f"{here}.qkv.{kind}", shape, rows(first, last))
        if model.qk_norm:
            sizes = (model.num_attention_heads * d, groups * d) if model.qk_norm_all_heads else (d, d)
            for name, size in zip("qk", sizes, strict=True):
                yield WeightPiece(f"{there}.{name}_norm.weight", f"{here}.{name}_norm.weight", (size,))
        yield WeightPiece(f"{there}.o_proj.weight", f"{here}.out.weight", (h, model.num_attention_heads * d))
        if model.add_bias_linear:
            yield WeightPiece(f"{there}.o_proj.bias", f"{here}.out.bias", (h,))


def layers_without(have: list[bool], *, listed: int) -> list[int] | None:
    """Return the value of a setting of `LAYER_LISTS` for the layers that lack a feature: [n] for every n-th layer, else a
    list of all layers, in which those layers are `listed`; None if there are none."""
    if all(have):
        return None
    every = have.index(False) + 1
    regular = all(one == ((index + 1) % every != 0) for index, one in enumerate(have))
    return [every] if regular else [1 - listed if one else listed for one in have]


def layer_kinds(model: ModelConfig) -> list[str]:
    """Return `layer_types` of config.json."""
    return [
        "linear_attention" if model.is_linear_layer(index) else LAYER_KINDS[model.has_window(index)]
        for index in range(model.num_layers)
    ]


def _mtp_pieces(model: ModelConfig, there: str, here: str, *, write: bool) -> Iterator[WeightPiece]:
    """Yield the tensors of an MTP layer beside those of a normal layer. Its copies of embedding and head are only written."""
    assert model.vocab_size is not None
    h = model.hidden_size
    yield WeightPiece(f"{there}.enorm.weight", f"{here}.embedding_norm.weight", (h,))
    yield WeightPiece(f"{there}.hnorm.weight", f"{here}.hidden_norm.weight", (h,))
    yield WeightPiece(f"{there}.eh_proj.weight", f"{here}.projection.weight", (h, 2 * h))
    yield WeightPiece(f"{there}.shared_head.norm.weight", f"{here}.final_norm.weight", (h,))
    if write:
        rows, word = (model.vocab_size, h), WORD
        head = word if model.tie_embeddings else "head.weight"
        for name, ours in (("embed_tokens", word), ("shared_head.head", head)):
            yield WeightPiece(f"{there}.{name}.weight", ours, rows, first_rows(model.vocab_size))


FUSED_MLP = ("mlp.gate_up_proj", "mlp.down_proj")


def _fused_mlp(model: ModelConfig, layer: str, here: str, names: tuple[str, str]) -> Iterator[WeightPiece]:
    h, f = model.hidden_size, model.ffn_size
    yield WeightPiece(f"{layer}.{names[0]}.weight", f"{here}.up.weight", (2 * f, h))
    yield WeightPiece(f"{layer}.{names[1]}.weight", f"{here}.down.weight", (h, f))


def mlp_pieces(model: ModelConfig, there: str, here: str, *, width: int | None = None) -> Iterator[WeightPiece]:
    """Yield the tensors of an MLP; `width`: by default the dense MLP's."""
    h, f = model.hidden_size, width or model.ffn_size
    parts = {"gate": part_at(0), "up": part_at(1)} if model.is_gated else {"up": whole}
    for kind in ("weight", "bias") if model.add_bias_linear else ("weight",):
        for name, part in parts.items():
            shape = (f, h) if kind == "weight" else (f,)
            yield WeightPiece(f"{there}.{name}_proj.{kind}", f"{here}.up.{kind}", shape, part)
    yield WeightPiece(f"{there}.down_proj.weight", f"{here}.down.weight", (h, f))
    if model.add_bias_linear:
        yield WeightPiece(f"{there}.down_proj.bias", f"{here}.down.bias", (h,))
