"""Runs one training step or one evaluation batch, and defines the objective.

The main term is the mean over all unmasked tokens of the global batch. The denominator is computed before the first
forward, and each microbatch's loss is a sum over tokens divided by it. Gradients and logged losses are then plain sums
over microbatches and over data- and context-parallel ranks, so no layout, mask or microbatch size changes the
objective. Terms that layers add (MoE's load balancing) are means over the sequences or tokens of the global batch."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megalite.config.batch import sequence_length
from megalite.data.loader import Microbatch, sample_ids
from megalite.models.attention import batch_logits, clipped_rows
from megalite.models.context import AuxiliaryLosses, ForwardContext, MTPInputs
from megalite.models.gpt import GPTStage
from megalite.optimizers.base import Rows, Update
from megalite.optimizers.schedules import Progress, Schedules
from megalite.partition.stages import message_parts
from megalite.pipeline.executor import Executor, Tracer
from megalite.pipeline.messages import MessageFormat
from megalite.topology.group import Group
from megalite.training.non_finite import NonFiniteError, OutputWatch, locate, remedy
from megalite.training.replica import Replica


def token_denominators(
    microbatches: Sequence[Microbatch], *, mtp_num_layers: int, dp: Group, device: torch.device
) -> torch.Tensor:
    """Count the unmasked tokens of the global batch, [1 + mtp_num_layers] in fp64 and at least 1: first those of the
    next-token loss, then those of each multi-token-prediction depth. Sums over this rank's microbatches and over dp.

    Collectives: one all-reduce of these numbers over dp."""
    # The masks are on the host. Counting there and filling in avoids a copy, for which the host would wait.
    total = torch.empty(1 + mtp_num_layers, dtype=torch.float64, device=device)
    for index, number in enumerate(total):
        masks = (each.loss_mask if index == 0 else _mtp_targets(each)[1][index - 1] for each in microbatches)
        number.fill_(sum(float(mask.sum(dtype=torch.float64)) for mask in masks))
    dp.all_reduce(total)
    return total.clamp_(min=1.0)


def _mtp_targets(microbatch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
    assert microbatch.mtp_labels is not None and microbatch.mtp_mask is not None
    return microbatch.mtp_labels, microbatch.mtp_mask


def mtp_inputs(microbatch: Microbatch, denominators: torch.Tensor, *, factor: float, device: torch.device) -> MTPInputs:
    """Return the multi-token-prediction inputs of a microbatch. Each depth's loss is a mean over its tokens of the
    global batch, and `factor` is the weight of the mean over depths."""
    labels, mask = (each.to(device, non_blocking=True) for each in _mtp_targets(microbatch))
    each = factor / len(labels) / denominators[1:]
    return MTPInputs(
        tokens=(microbatch.labels.to(device, non_blocking=True), *labels[:-1]),
        labels=tuple(labels),
        weights=tuple(mask * weight for mask, weight in zip(mask.double(), each, strict=True)),
    )


def masked_loss(losses: torch.Tensor, mask: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Return one microbatch's term of the objective: Σ loss·mask / denominator, for losses and mask [b, s]."""
    return (losses * mask.to(losses.dtype)).sum() / denominator.to(losses.dtype)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step; the same on every rank of the strategy's `scope`."""

    loss: float
    """Mean loss over all unmasked tokens of the global batch, or of the scope's share of it."""
    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    loss_scale: float
    """Loss scale of this step."""
    skipped: bool
    """No parameter changed: fp16 overflow, or a non-finite loss or gradient with `on_non_finite` skip."""
    auxiliary: dict[str, float]
    """Terms that layers added to the objective, including their coefficients, by name; not part of `loss`."""
    phase: str
    """Kind of exchange that the data-parallel strategy made."""
    wire_bytes: float
    """Bytes that this rank sent for data parallelism, without headers."""
    decoupled_lr: float | None = None
    """Learning rate of the word embedding and head, if it differs from `lr`."""
    num_zeros: int | None = None
    """Zero elements of the whole model's gradient, with log_num_zeros_in_grad."""
    gradient_noise_scale: float | None = None
    """Estimate in samples, averaged over steps, with log_gradient_noise_scale; None without an estimate."""
    fault: str | None = None
    """Log line on why the step was skipped, unless for an fp16 overflow."""


@dataclass(frozen=True)
class _Batch:
    """A global batch on one rank."""

    microbatches: Sequence[Microbatch]
    """Microbatches of this rank; empty if it reads no data."""
    first_sample: int
    size: int
    length: int
    """Tokens per sequence."""


class _Forward:
    """Runs a microbatch forward through a stage, for the executor. `denominators`: None on ranks without a head."""

    def __init__(
        self,
        replica: Replica,
        batch: _Batch,
        denominators: torch.Tensor | None,
        *,
        scale: float,
        auxiliary: AuxiliaryLosses | None,
    ) -> None:
        self._replica, self._batch, self._denominators = replica, batch, denominators
        self._scale, self._auxiliary = scale, auxiliary
        self._row_counts: dict[tuple[int, int], dict[int, Any]] = {}
        """Row counts of MoE layers in forwards that a recompute action (R) repeats, by stage and microbatch."""

    def __call__(self, stage: int, index: int, x: torch.Tensor | None) -> torch.Tensor:
        module, device = self._replica.stages[stage], self._replica.topology.device
        context = self._context(stage, index)
        if module.embedding is not None:
            x = self._batch.microbatches[index].tokens.to(device, non_blocking=True)
        assert x is not None
        if module.head is None:
            return module(x, context)
        microbatch = self._batch.microbatches[index]
        losses = module(x, context, labels=microbatch.labels.to(device, non_blocking=True))
        assert self._denominators is not None
        loss = masked_loss(losses, microbatch.loss_mask.to(device, non_blocking=True), self._denominators[0])
        return loss if self._scale == 1.0 else loss * self._scale

    def _context(self, stage: int, index: int) -> ForwardContext:
        replica, batch = self._replica, self._batch
        module, topology, training = replica.stages[stage], replica.topology, replica.config.training
        counts = self._row_counts.pop((stage, index), {})
        if training.recompute_ahead and not counts:
            self._row_counts[stage, index] = counts
        ids = sample_ids(
            batch.first_sample,
            index,
            dp_rank=topology.dp.rank,
            dp_size=topology.dp.size,
            micro_batch_size=training.micro_batch_size,
        )
        documents = batch.microbatches[index] if replica.finds_documents else None
        starts = documents.document_starts if documents else None
        return module.context(
            ids,
            seq_length=batch.length,
            spans=documents.spans if documents else None,
            attention_documents=starts if replica.hides_documents else None,
            position_documents=starts if replica.restarts_positions else None,
            auxiliary=self._auxiliary,
            mtp=self._mtp_inputs(module, index),
            row_counts=None if training.recompute_granularity == "none" else counts,
        )

    def _mtp_inputs(self, module: GPTStage, index: int) -> MTPInputs | None:
        """Return the inputs of multi-token prediction, on ranks with a head that has it."""
        if self._denominators is None or self._auxiliary is None or module.head is None or module.head.mtp is None:
            return None
        factor, device = self._replica.config.model.mtp_loss_scaling_factor, self._replica.topology.device
        return mtp_inputs(self._batch.microbatches[index], self._denominators, factor=factor, device=device)


class Stepper:
    """Runs steps of a replica. `tracer` is notified of every computation of training steps; the context manager `phase`
    encloses the parts `reduce` and `optimizer`, which are outside the pipeline's program."""

    def __init__(
        self,
        replica: Replica,
        schedules: Schedules,
        *,
        tracer: Tracer | None = None,
        phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._replica, self._schedules, self._tracer, self._phase = replica, schedules, tracer, phase
        self._executors: dict[tuple[int, int, bool], Executor] = {}
        self._forward: _Forward
        """Forward of the current batch."""
        self._shares = replica.topology.world.size // replica.strategy.scope.size
        """Number of groups of ranks that step separately, each on a share of the batch."""
        self._has_head = any(stage.head is not None for stage in replica.stages.values())
        model = replica.config.model
        coefficients = {"load_balancing_loss": model.moe_aux_loss_coeff, "z_loss": model.moe_z_loss_coeff}
        biased = [index for index in range(model.mtp_layers.stop) if model.is_moe_layer(index)]
        self._biased = biased if model.moe_router_enable_expert_bias else []
        """Layers of the whole model that have routers with a bias."""
        self._auxiliary_names = [name for name, value in coefficients.items() if model.num_experts and value]
        self._auxiliary_names += ["mtp_loss"] * (model.mtp_num_layers > 0) + ["indexer_loss"] * model.is_sparse

    def step(
        self,
        microbatches: Sequence[Microbatch],
        *,
        before: Progress,
        batch_size: int,
        meanwhile: Callable[[], object] | None = None,
    ) -> StepResult:
        """Run forward, backward, reduction, clipping and update for the global batch after `before`.

        `microbatches`: this rank's; none if it reads no data. `meanwhile` is called before the host waits for the device.

        Collectives: those of the program and the strategy, one all-reduce over dp for the token count and one over the
        world for loss and norm, so that every rank takes the same decisions. If the strategy's `scope` is smaller than
        the world, the first is omitted and the second is over the scope.

        Raises NonFiniteError on every rank of the scope, before any parameter changed."""
        replica, strategy = self._replica, self._replica.strategy
        after = Progress(before.step + 1, before.samples + batch_size)
        self._set_mode(training=True)
        scale = replica.scaler.scale
        strategy.begin_step(after.step, loss_scale=scale)
        batch = _Batch(microbatches, before.samples, batch_size, sequence_length(replica.config, before.step))
        auxiliary = self._auxiliary_losses(batch.size, batch.length, scale)
        losses = self._run(batch, scale=scale, auxiliary=auxiliary)
        replica.topology.world.heartbeat.phase("update")
        with self._phase("reduce"):
            strategy.finish_grad_sync()

        terms = [auxiliary.totals.get(name) for name in self._auxiliary_names]
        loads = self._loads(auxiliary)
        parts = strategy.norm_terms()
        zeros = [strategy.local_zeros()] if replica.config.logging.log_num_zeros_in_grad else []
        squares = [strategy.unreduced_squared] if replica.noise is not None else []
        # One all-reduce of all numbers that decide about the step, so that ranks agree; `sums` is popped in reverse.
        loss, *sums = self._totals(meanwhile, strategy.scope, losses, *parts, *terms, *zeros, *squares, *loads)
        chosen, sums = sums[len(sums) - len(loads) :], sums[: len(sums) - len(loads)]
        squared = sums.pop() / scale**2 if squares else math.nan
        num_zeros = int(sums.pop()) if zeros else None
        # If groups step separately, `_denominators` makes each loss a part of the step; log the mean of a share.
        loss, added = self._shares * loss / scale, [self._shares * term for term in sums[len(parts) :]]
        norms = strategy.norms(sums[: len(parts)])
        norm, clipping = norms.logged / scale, norms.clipping / scale
        scheduled = self._scheduled(before, after)
        lr, decoupled = self._schedules.lr(scheduled), self._schedules.decoupled_lr(scheduled)
        finite = math.isfinite(norm) and math.isfinite(loss)
        overflow, fault = (False, None) if finite else self._not_finite(loss, norm, batch, losses, after.step)
        skipped = overflow or fault is not None
        if replica.noise is not None and finite:
            replica.noise.update(norm**2, squared, batch_size)
        if not skipped:
            with self._phase("optimizer"):
                update = Update(
                    step=after.step,
                    lr=lr,
                    decoupled_lr=decoupled,
                    weight_decay=self._schedules.weight_decay(scheduled),
                    factor=self._factor(clipping, scale),
                    clipped_rows=self._clipped_rows(auxiliary),
                )
                strategy.update(replica.optimizer, update)
                self._balance(chosen)
        replica.scaler.update(overflow=overflow, fault=fault is not None, samples=batch_size)
        return StepResult(
            loss=loss,
            grad_norm=norm,
            lr=lr,
            loss_scale=scale,
            decoupled_lr=decoupled,
            num_zeros=num_zeros,
            gradient_noise_scale=None if replica.noise is None else replica.noise.scale,
            skipped=skipped,
            fault=fault,
            auxiliary=dict(zip(self._auxiliary_names, added, strict=True)),
            phase=strategy.phase(after.step),
            wire_bytes=strategy.take_wire_bytes(),
        )

    def _auxiliary_losses(self, batch_size: int, length: int, scale: float) -> AuxiliaryLosses:
        config = self._replica.config
        return AuxiliaryLosses(
            per_sequence=1.0 / batch_size,
            per_token=1.0 / (batch_size * length),
            scale=scale,
            device=self._replica.topology.device,
            records_logits=config.optimizer.qk_clip,
            sequences_per_loss=config.training.moe_aux_loss_sequences,
        )

    def _clipped_rows(self, auxiliary: AuxiliaryLosses) -> Rows:
        """Return the rows that QK-clip shrinks, by the logits of this step's forward."""
        replica, config = self._replica, self._replica.config
        if not config.optimizer.qk_clip:
            return {}
        logits = batch_logits(auxiliary, config.model, replica.topology.world)
        return clipped_rows(logits, config.model, config.optimizer)

    def _loads(self, auxiliary: AuxiliaryLosses) -> list[torch.Tensor]:
        """Return how often this rank's tokens chose each expert, for all layers that have a router with a bias."""
        experts = self._replica.config.model.num_experts or 0
        zeros = torch.zeros(experts, dtype=torch.float64, device=self._replica.topology.device)
        return [count for layer in self._biased for count in auxiliary.loads.get(layer, zeros).unbind()]

    def _balance(self, chosen: Sequence[float]) -> None:
        """Update the biases of this rank's routers from the expert counts of the global batch."""
        experts = self._replica.config.model.num_experts or 0
        for router in self._replica.routers if chosen else ():
            first = self._biased.index(router.layer) * experts
            router.balance(torch.tensor(chosen[first : first + experts], dtype=torch.float64))

    def params_norm(self) -> float:
        """Return the L2 norm of all main parameters. Collectives: one all-reduce of a number over the world."""
        total = self._replica.strategy.local_params_squared().clone()
        self._replica.topology.world.all_reduce(total)
        return math.sqrt(float(total))

    def _not_finite(
        self, loss: float, norm: float, batch: _Batch, losses: list[torch.Tensor], step: int
    ) -> tuple[bool, str | None]:
        """Return whether the gradients overflowed, and a log line if the step is skipped for another reason."""
        scaler, checks = self._replica.scaler, self._replica.config.training.check_for_nan_in_loss_and_grad
        # A too large scale makes gradients overflow; a non-finite loss has another cause.
        overflow = scaler.dynamic and (math.isfinite(loss) or not checks)
        shown = f"step {step}: loss {loss}, gradient norm {norm}"
        if overflow and checks:
            self._judge_overflow(shown)
        return overflow, self._fault(shown, batch, losses, step - 1) if checks and not overflow else None

    def _judge_overflow(self, shown: str) -> None:
        """Raise NonFiniteError after too many overflows in a row at the minimum loss scale."""
        scaler, training = self._replica.scaler, self._replica.config.training
        if scaler.scale <= training.min_loss_scale and scaler.overflows_in_a_row >= training.max_consecutive_skips:
            raise NonFiniteError(
                f"{shown}: gradients overflow although the loss scale is at its minimum, {scaler.scale:g}, and did in "
                f"max_consecutive_skips {training.max_consecutive_skips} steps before it too; the parameters are those "
                "before these steps. Lower --lr, or raise --lr-warmup-iters, or use bf16 in place of fp16"
            )

    def _fault(self, shown: str, batch: _Batch, losses: list[torch.Tensor], done: int) -> str:
        """Locate the cause of a non-finite step, and return a log line if it is skipped, or raise NonFiniteError.

        Collectives: a gather over the scope; those of a second forward if all ranks step together."""
        training = self._replica.config.training
        watch = OutputWatch(self._replica) if self._shares == 1 else None
        if watch is not None:
            with watch.watching():
                # Same weights, batch and dropout masks as in the step, so the result must be the same.
                self._run(batch, scale=1.0, auxiliary=None)
        where, in_weights = locate(self._replica, losses, batch.microbatches, watch)
        found = f"{shown} (samples {batch.first_sample} to {batch.first_sample + batch.size - 1}), {where}"
        before_it = self._replica.scaler.faults_in_a_row
        if training.on_non_finite == "stop" or in_weights:
            raise NonFiniteError(
                f"{found}: stopped before the update, so the parameters are those of the step before. "
                f"{remedy(self._replica.config, done, in_weights=in_weights)}"
            )
        if before_it >= training.max_consecutive_skips:
            raise NonFiniteError(
                f"{found}: max_consecutive_skips {training.max_consecutive_skips} steps before it were skipped too, so "
                "skipping does not help; the parameters are those before these steps. Lower --lr, or look at the data"
            )
        return f"warning: {found}: skipped ({before_it + 1} in a row)"

    def evaluate(
        self, microbatches: Sequence[Microbatch], *, first_sample: int, batch_size: int
    ) -> tuple[float, float]:
        """Return the loss of one global batch, without gradients and dropout, and its number of unmasked tokens; the
        same on every rank."""
        self._set_mode(training=False)
        batch = _Batch(microbatches, first_sample, batch_size, self._replica.config.training.seq_length)
        losses = self._run(batch, scale=1.0, auxiliary=None)
        counts = self._has_head and self._replica.topology.tp.rank == 0
        tokens = sum(float(each.loss_mask.sum(dtype=torch.float64)) for each in microbatches if counts)
        loss, tokens = self._totals(None, self._replica.topology.world, losses, tokens)
        return loss, tokens

    def _set_mode(self, *, training: bool) -> None:
        for stage in self._replica.stages.values():
            if stage.training != training:  # `train` visits every module
                stage.train(training)

    def _run(self, batch: _Batch, *, scale: float, auxiliary: AuxiliaryLosses | None) -> list[torch.Tensor]:
        """Return the losses of this rank's microbatches if it has the head. `auxiliary` is None in evaluation."""
        replica, evaluation = self._replica, auxiliary is None
        denominators = self._denominators(batch, evaluation=evaluation) if self._has_head else None
        self._forward = _Forward(replica, batch, denominators, scale=scale, auxiliary=auxiliary)
        count = batch.size // (replica.config.training.micro_batch_size * replica.topology.dp.size)
        try:
            with ExitStack() as constant:
                for stage in replica.stages.values():
                    if stage.fp8 is not None:
                        constant.enter_context(stage.fp8.caching_weights())
                return self._executor(count, batch.length, evaluation=evaluation).run()
        finally:
            del self._forward  # releases the batch

    def _denominators(self, batch: _Batch, *, evaluation: bool) -> torch.Tensor:
        topology, mtp_num_layers = self._replica.topology, self._replica.config.model.mtp_num_layers
        alone = not evaluation and self._shares > 1
        dp = Group.solo("dp") if alone else topology.dp_cp_scalars
        denominators = token_denominators(
            batch.microbatches, mtp_num_layers=mtp_num_layers, dp=dp, device=topology.device
        )
        # Each share is a mean by itself and one of several parts of the step.
        return denominators * self._shares if alone else denominators

    def _executor(self, microbatches: int, length: int, *, evaluation: bool) -> Executor:
        key = (microbatches, length, evaluation)
        if key not in self._executors:
            replica = self._replica
            any_stage = next(iter(replica.stages.values()))
            messages = MessageFormat(
                shape=any_stage.activation_shape(replica.config.training.micro_batch_size, length),
                dtype=replica.precision.compute,
                device=replica.topology.device,
                split_over=replica.topology.tp if message_parts(replica.config) > 1 else Group.solo("tp"),
                # Evaluation must not depend on the layout.
                compression="none" if evaluation else replica.config.parallel.pipeline_compression,
            )
            self._executors[key] = Executor(
                replica.programs.program(microbatches, evaluation=evaluation),
                rank=replica.topology.pp.rank,
                edges=replica.topology.edges,
                # The executor is cached over steps, and must not keep a batch alive.
                forward=lambda *arguments: self._forward(*arguments),
                messages=messages,
                reducer=None if evaluation else replica.strategy,
                deferred=replica.deferred,
                tracer=None if evaluation else self._tracer,
                heartbeat=replica.topology.world.heartbeat,
                check_memory=replica.config.parallel.pipeline_check_memory,
            )
        return self._executors[key]

    def _totals(
        self,
        meanwhile: Callable[[], object] | None,
        over: Group,
        losses: list[torch.Tensor],
        *parts: torch.Tensor | float | None,
    ) -> list[float]:
        """Sum the losses, each counted once, and each further number over a group in one all-reduce. Call `meanwhile`
        before the host waits for the device."""
        topology = self._replica.topology
        totals = torch.zeros(1 + len(parts), dtype=torch.float64, device=topology.device)
        if self._has_head and topology.tp.rank == 0:
            totals[0] = torch.stack(losses).sum(dtype=torch.float64)
        for index, part in enumerate(parts, start=1):
            if part is not None:
                totals[index] = part
        over.all_reduce(totals)
        if meanwhile is not None:
            meanwhile()
        # The host waits for the device only here in a step.
        with topology.world.heartbeat.synchronise():
            return totals.tolist()

    def _scheduled(self, before: Progress, after: Progress) -> Progress:
        """Return the position in the schedules of learning rate and weight decay, which omits skipped steps."""
        scaler, position = self._replica.scaler, self._schedules.read_at(before, after)
        return Progress(position.step - scaler.skipped_steps, position.samples - scaler.skipped_samples)

    def _factor(self, norm: float, scale: float) -> float:
        """Return the factor that removes the loss scale and clips, which the optimizer applies to the gradients."""
        clip = self._replica.config.optimizer.clip_grad
        factor = 1.0 / scale
        if clip > 0.0 and norm > clip:
            # torch's clip_grad_norm_ and Megatron-LM add 1e-6 too.
            factor *= clip / (norm + 1e-6)
        return factor
