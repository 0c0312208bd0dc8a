"""One training step and one evaluation batch, and the objective with the only divisions in it.

The main term is the mean over all unmasked tokens of the global batch. The denominator is known before the first forward;
microbatch losses are sums over tokens divided by it; gradients and logged losses are then plain sums over
microbatches and over data- and context-parallel ranks. So no layout, mask or microbatch size can change what is
optimized. Terms that layers add (MoE's load balancing) are means over the sequences or tokens of the global batch.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megalite.config.batch import sequence_length
from megalite.data.loader import Microbatch, sample_ids
from megalite.models.context import AuxiliaryLosses, ForwardContext, MTPInputs
from megalite.models.gpt import GPTStage
from megalite.optimizers.base import Rows, Update
from megalite.optimizers.schedules import Progress, Schedules
from megalite.partition.stages import message_parts
from megalite.pipeline.executor import Executor, Tracer
from megalite.topology.group import Group
from megalite.training.non_finite import NonFiniteError, OutputWatch, locate, remedy
from megalite.training.replica import Replica


def token_denominators(
    microbatches: Sequence[Microbatch], *, mtp_num_layers: int, dp: Group, device: torch.device
) -> torch.Tensor:
    """Unmasked tokens of the global batch, fp64 and at least 1, and of those after the next that each position predicts,
    [1 + mtp_num_layers]: the sum over this rank's microbatches and over dp.

    Collectives: one all-reduce of these numbers over dp.
    """
    # Counted on the host, where the masks are, and filled in: a copy from there would make the host wait.
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
    """Of one microbatch: each depth's loss is a mean over its tokens of the global batch, and `factor` is the weight of the
    mean over the depths."""
    labels, mask = (each.to(device, non_blocking=True) for each in _mtp_targets(microbatch))
    each = factor / len(labels) / denominators[1:]
    return MTPInputs(
        tokens=(microbatch.labels.to(device, non_blocking=True), *labels[:-1]),
        labels=tuple(labels),
        weights=tuple(mask * weight for mask, weight in zip(mask.double(), each, strict=True)),
    )


def masked_loss(losses: torch.Tensor, mask: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """One microbatch's term of the objective: Σ loss·mask / denominator, for losses and mask [b, s]."""
    return (losses * mask.to(losses.dtype)).sum() / denominator.to(losses.dtype)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did; the same on every rank of the strategy's `scope`."""

    loss: float
    """Cross-entropy: mean over all unmasked tokens of the global batch, or of the scope's share of it."""
    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    loss_scale: float
    """Scale that this step's loss was multiplied with."""
    skipped: bool
    """fp16 overflow, or a loss or gradient that is not finite, with `on_non_finite` skip: no parameter changed."""
    auxiliary: dict[str, float]
    """Terms that layers added to the objective, each with its coefficient, by name; not part of `loss`."""
    phase: str
    """What the data-parallel strategy exchanged."""
    wire_bytes: float
    """What this rank has sent for data parallelism, without headers; of this rank alone."""
    decoupled_lr: float | None = None
    """That of word embedding and head, where it is another."""
    num_zeros: int | None = None
    """Elements of the whole model's gradient that are 0, with log_num_zeros_in_grad."""
    gradient_noise_scale: float | None = None
    """In samples, averaged over steps, with log_gradient_noise_scale; None where there is no estimate."""
    fault: str | None = None
    """Why it was skipped, for the log, where that is no fp16 overflow."""


@dataclass(frozen=True)
class _Batch:
    """A global batch, as one rank has it."""

    microbatches: Sequence[Microbatch]
    """Those of this rank; empty where it reads no data."""
    first_sample: int
    size: int
    length: int
    """Of each sequence."""


class _Forward:
    """What the executor calls: a microbatch of the batch through a stage. `denominators`: where the head is here."""

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
        """Of passes that an R will run again."""

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
        """The tokens after the next, where a head learns to predict them."""
        if self._denominators is None or self._auxiliary is None or module.head is None or module.head.mtp is None:
            return None
        factor, device = self._replica.config.model.mtp_loss_scaling_factor, self._replica.topology.device
        return mtp_inputs(self._batch.microbatches[index], self._denominators, factor=factor, device=device)


class Stepper:
    """Runs steps of a replica. `tracer` sees every computation of training steps; `phase` is entered, by name, around what is
    none: `reduce` and `optimizer`."""

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
        """Of the batch that is under way."""
        self._shares = replica.topology.world.size // replica.strategy.scope.size
        """Groups of ranks that each step by their own share of the batch; 1: all step by the whole."""
        self._head_here = any(stage.head is not None for stage in replica.stages.values())
        model = replica.config.model
        coefficients = {"load_balancing_loss": model.moe_aux_loss_coeff, "z_loss": model.moe_z_loss_coeff}
        biased = [index for index in range(model.mtp_layers.stop) if model.is_moe_layer(index)]
        self._biased = biased if model.moe_router_enable_expert_bias else []
        """Layers with routers that have a bias, of all stages."""
        self._auxiliary_names = [name for name, value in coefficients.items() if model.num_experts and value]
        self._auxiliary_names += ["mtp_loss"] * (model.mtp_num_layers > 0)

    def step(self, microbatches: Sequence[Microbatch], *, before: Progress, batch_size: int) -> StepResult:
        """Forward, backward, reduction, clipping and update over the global batch after `before`.

        `microbatches` are this rank's; empty on ranks that read no data.

        Collectives: those of the program and the strategy, one all-reduce over dp for the token count and one over
        the world for loss and norm, by which every rank takes the same decisions; where the strategy's `scope` is less
        than the world, the first is none and the other is over the scope.

        A NonFiniteError comes on every rank of the scope, before any parameter changed.
        """
        replica, strategy, training = self._replica, self._replica.strategy, self._replica.config.training
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
        # One all-reduce for all that ranks decide by: each then takes the same way. What came last is taken off first.
        loss, *sums = self._totals(strategy.scope, losses, *parts, *terms, *zeros, *squares, *loads)
        chosen, sums = sums[len(sums) - len(loads) :], sums[: len(sums) - len(loads)]
        squared = sums.pop() / scale**2 if squares else math.nan
        num_zeros = int(sums.pop()) if zeros else None
        # Where ranks do not step together each loss is one part of the step (`_run`); here it becomes the mean of a share.
        loss, added = self._shares * loss / scale, [self._shares * term for term in sums[len(parts) :]]
        norms = strategy.norms(sums[: len(parts)])
        norm, clipping = norms.shown / scale, norms.clipping / scale
        scheduled = self._scheduled(before, after)
        lr, decoupled = self._schedules.lr(scheduled), self._schedules.decoupled_lr(scheduled)
        finite = math.isfinite(norm) and math.isfinite(loss)
        checks = training.check_for_nan_in_loss_and_grad
        # The scale can be too large for gradients; a loss that is not finite itself has another cause.
        overflow = replica.scaler.dynamic and not finite and (math.isfinite(loss) or not checks)
        fault = None
        shown = f"step {after.step}: loss {loss}, gradient norm {norm}"
        if overflow and checks:
            self._judge_overflow(shown)
        elif not finite and checks:
            fault = self._fault(shown, batch, losses, before.step)
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
            wire_bytes=strategy.wire(),
        )

    def _auxiliary_losses(self, batch_size: int, length: int, scale: float) -> AuxiliaryLosses:
        config = self._replica.config
        return AuxiliaryLosses(
            per_sequence=1.0 / batch_size,
            per_token=1.0 / (batch_size * length),
            scale=scale,
            device=self._replica.topology.device,
            watches_logits=config.optimizer.qk_clip,
            together=config.training.moe_aux_loss_sequences,
        )

    def _clipped_rows(self, auxiliary: AuxiliaryLosses) -> Rows:
        """Of QK-clip, by the logits of this step's forward."""
        replica, config = self._replica, self._replica.config
        if not config.optimizer.qk_clip:
            return {}
        from megalite.training.qk_clip import clipped_rows, largest_logits

        logits = largest_logits(auxiliary, config.model, replica.topology.world)
        return clipped_rows(logits, config.model, config.optimizer)

    def _loads(self, auxiliary: AuxiliaryLosses) -> list[torch.Tensor]:
        """How often each expert was chosen by this rank's tokens, of all layers with a router that has a bias."""
        experts = self._replica.config.model.num_experts or 0
        zeros = torch.zeros(experts, dtype=torch.float64, device=self._replica.topology.device)
        return [count for layer in self._biased for count in auxiliary.loads.get(layer, zeros).unbind()]

    def _balance(self, chosen: Sequence[float]) -> None:
        """Move the biases of the routers here by the counts of the global batch, layer by layer."""
        experts = self._replica.config.model.num_experts or 0
        for router in self._replica.routers if chosen else ():
            first = self._biased.index(router.layer) * experts
            router.balance(torch.tensor(chosen[first : first + experts], dtype=torch.float64))

    def params_norm(self) -> float:
        """L2 norm of all main parameters. Collectives: one all-reduce of a number over the world."""
        total = self._replica.strategy.local_params_squared().clone()
        self._replica.topology.world.all_reduce(total)
        return math.sqrt(float(total))

    def _judge_overflow(self, shown: str) -> None:
        """One more step overflows; only those count that a smaller scale cannot help."""
        scaler, training = self._replica.scaler, self._replica.config.training
        if scaler.scale <= training.min_loss_scale and scaler.overflows_in_a_row >= training.max_consecutive_skips:
            raise NonFiniteError(
                f"{shown}: gradients overflow although the loss scale is at its minimum, {scaler.scale:g}, and did in "
                f"max_consecutive_skips {training.max_consecutive_skips} steps before it too; the parameters are those of "
                "before them. Lower --lr, or raise --lr-warmup-iters, or use bf16 in place of fp16"
            )

    def _fault(self, shown: str, batch: _Batch, losses: list[torch.Tensor], done: int) -> str:
        """Find out where a step went wrong; returns what the log says of it if it is to be skipped.

        Collectives: where all ranks take steps together those of a second forward; a gather over the scope.
        """
        training = self._replica.config.training
        watch = OutputWatch(self._replica) if self._shares == 1 else None
        if watch is not None:
            with watch.watching():
                # Weights, batch and dropout masks are those of the step: nothing else could make another result.
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
                "skipping does not help; the parameters are those of before them. Lower --lr, or look at the data"
            )
        return f"warning: {found}: skipped ({before_it + 1} in a row)"

    def evaluate(self, microbatches: Sequence[Microbatch], *, first_sample: int, batch_size: int) -> float:
        """The objective on one global batch, without gradients and without dropout; the same on every rank."""
        self._set_mode(training=False)
        batch = _Batch(microbatches, first_sample, batch_size, self._replica.config.training.seq_length)
        losses = self._run(batch, scale=1.0, auxiliary=None)
        return self._totals(self._replica.topology.world, losses)[0]

    def _set_mode(self, *, training: bool) -> None:
        for stage in self._replica.stages.values():
            if stage.training != training:  # it visits every module
                stage.train(training)

    def _run(self, batch: _Batch, *, scale: float, auxiliary: AuxiliaryLosses | None) -> list[torch.Tensor]:
        """The losses of this rank's microbatches, if the head is here; `auxiliary` is None in evaluation."""
        replica, evaluation = self._replica, auxiliary is None
        denominators = self._denominators(batch, evaluation=evaluation) if self._head_here else None
        self._forward = _Forward(replica, batch, denominators, scale=scale, auxiliary=auxiliary)
        count = batch.size // (replica.config.training.micro_batch_size * replica.topology.dp.size)
        try:
            with ExitStack() as constant:
                for stage in replica.stages.values():
                    if stage.fp8 is not None:
                        constant.enter_context(stage.fp8.keeping())
                return self._executor(count, batch.length, evaluation=evaluation).run()
        finally:
            del self._forward  # and with it the batch

    def _denominators(self, batch: _Batch, *, evaluation: bool) -> torch.Tensor:
        topology, mtp_num_layers = self._replica.topology, self._replica.config.model.mtp_num_layers
        alone = not evaluation and self._shares > 1
        dp = Group.solo("dp") if alone else topology.dp_cp_scalars
        denominators = token_denominators(
            batch.microbatches, mtp_num_layers=mtp_num_layers, dp=dp, device=topology.device
        )
        # A share is a batch by itself, and one of several parts of the step.
        return denominators * self._shares if alone else denominators

    def _executor(self, microbatches: int, length: int, *, evaluation: bool) -> Executor:
        key = (microbatches, length, evaluation)
        if key not in self._executors:
            replica = self._replica
            any_stage = next(iter(replica.stages.values()))
            self._executors[key] = Executor(
                replica.programs.program(microbatches, evaluation=evaluation),
                rank=replica.topology.pp.rank,
                edges=replica.topology.edges,
                # An executor is kept over steps, and must not keep a batch.
                forward=lambda *arguments: self._forward(*arguments),
                activation_shape=any_stage.activation_shape(replica.config.training.micro_batch_size, length),
                dtype=replica.precision.compute,
                device=replica.topology.device,
                shared=replica.topology.tp if message_parts(replica.config) > 1 else None,
                # A loss of the weights: evaluated anywhere else it is the same.
                compression="none" if evaluation else replica.config.parallel.pipeline_compression,
                reducer=None if evaluation else replica.strategy,
                deferred=replica.deferred,
                tracer=None if evaluation else self._tracer,
                heartbeat=replica.topology.world.heartbeat,
                check_memory=replica.config.parallel.pipeline_check_memory,
            )
        return self._executors[key]

    def _totals(self, over: Group, losses: list[torch.Tensor], *parts: torch.Tensor | None) -> list[float]:
        """Sums over a group, in one all-reduce: of the losses, each counted once, and of each further number."""
        topology = self._replica.topology
        totals = torch.zeros(1 + len(parts), dtype=torch.float64, device=topology.device)
        if self._head_here and topology.tp.rank == 0:
            totals[0] = torch.stack(losses).sum(dtype=torch.float64)
        for index, part in enumerate(parts, start=1):
            if part is not None:
                totals[index] = part
        over.all_reduce(totals)
        # The one place of a step where the host waits for the device.
        with topology.world.heartbeat.synchronise():
            return totals.tolist()

    def _scheduled(self, before: Progress, after: Progress) -> Progress:
        """Where learning rate and weight decay are: they wait for steps that were skipped."""
        scaler, position = self._replica.scaler, self._schedules.read_at(before, after)
        return Progress(position.step - scaler.skipped_steps, position.samples - scaler.skipped_samples)

    def _factor(self, norm: float, scale: float) -> float:
        """What undoes the loss scale and clips, in the one pass over gradients that the optimizer makes anyway."""
        clip = self._replica.config.optimizer.clip_grad
        factor = 1.0 / scale
        if clip > 0.0 and norm > clip:
            # With 1e-6, as torch's clip_grad_norm_ and Megatron-LM have it.
            factor *= clip / (norm + 1e-6)
        return factor
