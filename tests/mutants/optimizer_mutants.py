"""Faults of learning rates by width, of averages, of clipped heads, of what waits on the host, of balanced contexts, of relaxed
exchanges and of shared memory."""

from tests.mutants.mutant import Mutant

_MUP = "tests/models/test_mup.py::test_first_values_rates_and_factors"
_CLIP = "tests/training/test_qk_clip.py::test_logits_shrink_to_the_limit[groups]"
_HOST = "tests/models/test_offload.py::test_no_bit_is_another[gpt]"
_BALANCE = "tests/context_parallel/test_balance.py::test_layers_with_a_window_count_as_they_are"

RATES_AND_AVERAGES = (
    Mutant(
        "wide matrices learn as narrow ones",
        "megalite/models/shapes.py",
        "factors.append(1 / model.width_multiplier)",
        "factors.append(1.0)",
        _MUP,
        "muP's learning rates do not fall with the width",
    ),
    Mutant(
        "wide models start as narrow ones",
        "megalite/config/model.py",
        "return self.init_method_std / math.sqrt(self.width_multiplier)",
        "return self.init_method_std",
        _MUP,
        "muP's first values do not fall with the width",
    ),
    Mutant(
        "the average takes what it should keep",
        "megalite/optimizers/base.py",
        "average.lerp_(values, 1.0 - self.config.ema_decay)",
        "average.lerp_(values, self.config.ema_decay)",
        "tests/optimizers/test_weight_average.py::test_the_equation_and_what_is_evaluated",
        "an EMA with decay 0.999 follows the weights at once",
    ),
    Mutant(
        "every step weighs the same",
        "megalite/optimizers/schedule_free.py",
        "share = self._largest_lr**2 / self._squares",
        "share = 1.0 / self.updates",
        "tests/optimizers/test_schedule_free.py::test_it_is_the_paper",
        "steps of the warm-up count as much as those after it",
    ),
)

CLIPPED_HEADS = (
    Mutant(
        "queries are clipped twice and keys never",
        "megalite/training/qk_clip.py",
        "factor**alpha, factor ** (1.0 - alpha)",
        "factor, 1.0",
        "tests/training/test_qk_clip.py::test_a_head_below_the_limit_is_left_alone",
        "the share of QK-clip that keys take is lost",
    ),
    Mutant(
        "heads are clipped by the first of their group",
        "megalite/training/qk_clip.py",
        "largest = max(heads[group * shared : (group + 1) * shared])",
        "largest = heads[group * shared]",
        _CLIP,
        "a head that shares its key with a smaller one keeps its logits",
    ),
    Mutant(
        "the last row of a head is left",
        "megalite/optimizers/base.py",
        "stop = min((min(end, bottom) - top) * width + shift,",
        "stop = min((min(end, bottom) - top - 1) * width + shift,",
        _CLIP,
        "QK-clip leaves a row as it was",
    ),
)

HOST_MEMORY = (
    Mutant(
        "views come back from the start of their memory",
        "megalite/models/offload.py",
        "int(saved.storage_offset())",
        "0",
        _HOST,
        "a part of a tensor that was on the host is its first part",
    ),
    Mutant(
        "memory is filled again before it has been copied",
        "megalite/models/offload.py",
        "after=(self.copied, self._of.back.now())",
        "after=(self._of.back.now(),)",
        _HOST,
        "activations are brought back from host memory that the copy out has not reached",
    ),
)

BALANCED = (
    Mutant(
        "chunks weigh the same",
        "megalite/topology/layout.py",
        "loads[rank] += areas[index]",
        "loads[rank] += 1",
        _BALANCE,
        "ranks get equally many chunks whatever their pairs",
    ),
)

EXCHANGES = (
    Mutant(
        "part of the sum taken for the mean",
        "megalite/data_parallel/shards.py",
        "small = self._ranks * parts",
        "small = parts",
        "tests/training/test_gradient_noise.py::test_known_noise_is_found",
        "the noise scale's small batch has the gradient of a part of the sum",
    ),
    Mutant(
        "weights sent for changes",
        "megalite/data_parallel/more/local_sgd.py",
        "change = values - self._public[replicas.across.rank][bucket]",
        "change = values.clone()",
        "tests/data_parallel/test_gossip.py::test_choco_sgd_is_the_papers[2-0-1]",
        "public copies grow by whole weights",
    ),
    Mutant(
        "an average without its snapshot",
        "megalite/data_parallel/more/local_sgd.py",
        "torch.sub(self._whole(bucket, mean), change, out=change)",
        "change.copy_(self._whole(bucket, mean))",
        "tests/data_parallel/test_local_sgd.py::test_asynchronous_model_averaging[2-0-4-3-1]",
        "an asynchronous mean is added whole",
    ),
    Mutant(
        "no rank waits for its peers' memory",
        "megalite/topology/shared_memory.py",
        "self._await(rank, before, operation)",
        "pass",
        "tests/topology/test_shared_memory.py::test_operations_under_way_finish_in_any_order",
        "slots are read before they are written",
    ),
    Mutant(
        "each rank rounds by its own scale",
        "megalite/data_parallel/fully_sharded.py",
        "    largest_of_all(largest)\n",
        "",
        "tests/data_parallel/test_fp8_gather.py::test_the_bits_of_a_gather_in_bf16[2-{}]",
        "gathered weights are factors of 2 too large or small",
    ),
    Mutant(
        "a basis that never turns",
        "megalite/optimizers/soap.py",
        "basis.copy_(turned",
        "(turned",
        "tests/optimizers/test_soap.py::test_updates_are_those_of_the_formulas_matrix_by_matrix[1]",
        "the eigenbasis stays the identity",
    ),
)
