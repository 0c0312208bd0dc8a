"""Megatron-LM's flags that are not settings here, in one table by class, so that launch scripts port.

megalite's flags are those of settings (`describe.settings`) and of `megatron.STANDS_FOR`. All others are here:

- already so: requests megalite's only behaviour. Accepted, and named in one line.
- no effect here: controls the speed, memory or logging of a part that megalite does not have. Accepted, and named in
  that line.
- refused: changes the numbers or the result and is not supported. An error with the reason and what works.

Nothing that changes numbers is accepted silently. The list covers `pretrain_gpt.py` of August 2026, earlier versions
and forks. A row is `why | flags`: `--flag` takes no value, `--flag=` one, `--flag=*` any number; `--flag=a|b` belongs
to its class only with these values (a regular expression) and is otherwise refused."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from megalite.config.errors import ConfigError

ALREADY_SO, NO_EFFECT_HERE, REFUSED, DIFFERS = "already so", "no effect here", "refused", "differs"
"""Classes of flags. `differs`: megalite accepts the flag and reports the difference each time."""

_ALREADY_SO = r"""
attention's softmax is computed in fp32 (fp64 in fp64 runs), where the factor of a layer cancels |
    --attention-softmax-in-fp32 --apply-query-key-layer-scaling --no-query-key-layer-scaling
there is one implementation of the model, with the kernels of its device |
    --use-mcore-models --use-legacy-models --transformer-impl=local|transformer_engine|inference_optimized
    --use-flash-attn --use-flash-attn-v1 --use-flash-attn-v2 --use-flash-attn-triton --use-te-activation-func
gradients are accumulated in fp32, and reduced in it unless --wire-dtype bf16 is given |
    --accumulate-allreduce-grads-in-fp32 --main-grads-dtype=fp32 --megatron-fsdp-main-grads-dtype=fp32|auto
    --ddp-reduce-scatter-with-fp32-accumulation --gtp-remat-reduce-scatter-with-fp32-accumulation
    --ddp-param-name-patterns-for-fp32-local-accumulation=*
main parameters are fp32; --main-params split stores only the bits that bf16 parameters lack |
    --main-params-dtype=fp32 --megatron-fsdp-main-params-dtype=fp32|auto
--main-params, --exp-avg-dtype and --exp-avg-sq-dtype work without it | --use-precision-aware-optimizer
with --optimizer-cpu-offload, copies overlap with the update in both directions | --overlap-cpu-optimizer-d2h-h2d
--data-parallel-sharding-strategy or --dp-strategy decides what is sharded | --use-megatron-fsdp --use-custom-fsdp
the loss is the mean over the unmasked tokens of the global batch, and gradients are summed |
    --calculate-per-token-loss --ddp-average-in-collective
--hybrid-layer-pattern chooses the layers |
    --is-hybrid-model --spec=*\[?\S*(mamba|hybrid)_layer_specs,?\s\S*(mamba|hybrid)_stack_spec\]?
the indexer's queries and keys are not rotated, which would change no score; its norm and scores are fp32 |
    --no-dsa-indexer-rotate-activation --disable-dsa-indexer-rotate-activation --dsa-indexer-k-norm-fp32
every layer chooses its own keys | --dsa-indexer-topk-freq=1
states of Mamba-2 are fp32; what is between its projections is recomputed |
    --mamba-training-ssm-states-dtype=fp32 --mamba-inference-conv-states-dtype= --mamba-inference-ssm-states-dtype=
    --disable-mamba-mem-eff-path
each stage reduces and gathers separately, when its layers are ready |
    --no-align-grad-reduce --disable-align-grad-reduce --align-param-gather --no-align-param-gather
    --overlap-param-gather-with-optimizer-step
muP multiplies embeddings by --embedding-multiplier, logits by its own factor, and divides scores by the head size |
    --mup-embedding-mult=1|1\.0* --mup-output-mult=1|1\.0* --mup-attn-scale-power=1|1\.0*
sends and receives are asynchronous | --overlap-p2p-communication --overlap-p2p-communication-warmup-flush
shared experts compute during the all-to-all | --moe-shared-expert-overlap
samples are read once per epoch, in the order of --seed and --data-order | --dataloader-type=single
token files are memory-mapped .bin/.idx pairs | --data-impl=mmap
no attention mask is built: attention is causal | --no-create-attention-mask-in-dataloader
no token is treated as padding | --allow-ambiguous-pad-tokens
random numbers have no state, and initial weights do not depend on device or layout |
    --use-cpu-initialization --data-parallel-random-init --no-load-rng --no-save-rng --te-rng-tracker
    --inference-rng-tracker
a signal saves a checkpoint: see --exit-signals |
    --exit-signal-handler --exit-signal-handler-for-training --exit-signal-handler-for-dataloader
loss spikes are reported: see --loss-spike-threshold | --check-for-spiky-loss
learning rate and weight decay follow the current settings |
    --override-opt-param-scheduler --override-lr-scheduler
each rank loads the slices that it needs, and only a checkpoint that verifies is loaded |
    --auto-detect-ckpt-format --dist-ckpt-strictness= --verify-integrity --no-use-tokenizer-model-from-checkpoint-args
    --disable-use-tokenizer-model-from-checkpoint-args
any layout can load a checkpoint | --dist-ckpt-optim-fully-reshardable --ckpt-assume-constant-structure
it is always logged |
    --log-throughput --log-memory-to-tensorboard --log-world-size-to-tensorboard --log-batch-size-to-tensorboard
    --log-learning-rate-to-tensorboard --log-loss-scale-to-tensorboard --log-validation-ppl-to-tensorboard
    --log-timers-to-tensorboard --log-device-memory-used --log-straggler --moe-per-layer-logging
ranks come from torchrun's environment | --local-rank= --lazy-mpu-init --dist-url=
pretraining is the only mode | --train-mode=pretrain
routing is computed in fp32 (fp64 in fp64 runs) | --moe-router-dtype=fp32|fp64
tokens are exchanged by an all-to-all over --ep; other dispatchers produce the same numbers |
    --moe-token-dispatcher-type=alltoall|allgather|flex|alltoall_seq
--etp sets this | --moe-extended-tp
no errors are injected | --error-injection-rate=0
only --dp-strategy shards and gathers weights |
    --tensor-parallel-num-weight-shards=1 --expert-tensor-parallel-num-weight-shards=1
blends take as many samples as they need: another surplus would change the sample order |
    --mid-level-dataset-surplus=0?\.0050*
--fp8 scales without a margin and keeps the first and last layer in bf16 |
    --fp8-margin=0 --first-last-layers-bf16 --num-layers-at-start-in-bf16=1 --num-layers-at-end-in-bf16=1
tokens are sent in the format of --precision | --moe-dispatch-fwd-dtype=bf16 --moe-combine-bwd-dtype=bf16
quantile balancing of the router is not supported | --moe-router-quantile-balancing-ema=0|0?\.0*
muon orthogonalises whole matrices by Keller Jordan's coefficients and leaves the rest to AdamW |
    --muon-tp-mode=duplicated|distributed --muon-scalar-optimizer=adam --muon-coefficient-type=simple
the vocabulary has only the tokenizer's tokens; set another size with --vocab-size | --vocab-extra-ids=0
--profile always uses torch.profiler | --use-pytorch-profiler
text is tokenized before training, by megalite preprocess |
    --tokenizer-hf-no-use-fast --tokenizer-hf-no-include-special-tokens
    --no-tokenizer-sentencepiece-ignore-extra-whitespaces --disable-tokenizer-sentencepiece-ignore-extra-whitespaces
    --use-gigatoken
no storage service is used | --disable-msc
"""
_NO_EFFECT = r"""
kernels and fusions: the fastest kernel for the device is picked |
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm --cross-entropy-loss-fusion
    --cross-entropy-fusion-impl= --moe-router-fusion --moe-grouped-gemm --moe-use-legacy-grouped-gemm
    --moe-permute-fusion --disable-jit-fuser --use-fused-weighted-squared-relu --fused-residual-rmsnorm
    --use-transformer-engine-op-fuser --use-grouped-gemm-for-shared-expert --use-grouped-gemm-for-dense-mlp
    --moe-use-grouped-tensor --moe-single-grouped-weight --moe-single-grouped-bias --flash-attention-version=
    --mlp-chunks-for-training= --no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding
    --moe-shared-expert-glu-interleave-size= --moe-mlp-glu-interleave-size= --muon-use-syrk
    --no-gradient-reduce-div-fusion --onnx-safe= --no-scaled-masked-softmax-fusion --no-torch-compile
    --abort-on-unmet-fused-kernel-constraints --dsa-kernel-backend=
CUDA graphs |
    --cuda-graph-impl= --enable-cuda-graph --external-cuda-graph --cuda-graph-scope=* --cuda-graph-modules=*
    --cuda-graph-warmup-steps= --optimizer-cuda-graph --inference-cuda-graph-scope=
    --moe-pad-experts-for-cuda-graph-inference
other kinds of overlap |
    --no-async-tensor-model-parallel-allreduce --no-overlap-p2p-communication --tp-comm-overlap-cfg=
    --no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad
    --no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag --no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs
    --tp-comm-overlap-rs-dgrad --no-tp-comm-split-ag --disable-tp-comm-split-ag --no-tp-comm-split-rs
    --disable-tp-comm-split-rs --tp-comm-bootstrap-backend= --overlap-moe-expert-parallel-comm --delay-wgrad-compute
    --overlap-dispatch-backward-with-experts-wgrad --ep-overlap-early-attn-memory-release --use-ring-exchange-p2p
    --defer-embedding-wgrad-compute --wgrad-deferral-limit= --delay-grad-reduce --no-delay-grad-reduce
    --high-priority-a2a-comm-stream
buffers and transports of communication |
    --use-nccl-ub --disable-symmetric-registration --gtp-remat-nccl-ub --gtp-expert-remat-nccl-ub
    --gtp-remat-opt-in-modules=* --fsdp-manual-registration --fsdp-double-buffer --create-all-gather-group
    --suggested-communication-unit-size= --ddp-num-buckets= --ddp-pad-buckets-for-high-nccl-busbw --use-sharp
    --sharp-enabled-group= --high-priority-stream-groups=* --distributed-timeout-seconds-after-init=
    --disable-gloo-process-groups --pipeline-model-parallel-comm-backend= --moe-enable-deepep
    --moe-flex-dispatcher-backend= --moe-flex-dispatcher-num-sms= --moe-deepep-num-sms= --moe-hybridep-num-sms=
    --moe-hybridep-num-blocks-permute= --moe-hybridep-num-blocks-unpermute= --moe-hybridep-num-sms-preprocessing=
    --moe-permute-fusion-into-hybridep --moe-hybridep-pad-uneven-dispatch-inputs --moe-ncclep-zero-copy
    --symmetric-ar-type= --megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer
    --fsdp-db-use-persist-buf-on-alloc-fail --max-seqlen-per-dp-cp-rank= --gpu-sniff-test-interval=
    --train-sync-interval= --fake-process-group --no-contiguous-buffers-in-local-ddp
how Megatron's optimizers and FSDP lay out and shard states |
    --outer-dp-sharding-strategy= --enable-full-sharding-in-hsdp --megatron-fsdp-version=
    --no-use-layer-wise-param-layout --keep-fp8-transpose-cache --torch-fsdp2-no-reshard-after-forward
    --init-model-with-meta-device --no-initialization --dump-param-to-param-group-map=
    --reuse-grad-buf-for-mxfp8-param-ag --fp4-param-gather
DeepSpeed is not used: --dp-strategy shards, --pp cuts and --recompute-granularity recomputes |
    --deepspeed --no-pipeline-parallel --pp-partition-method= --deepspeed-activation-checkpointing
    --partition-activations --contigious-checkpointing --checkpoint-in-cpu --synchronize-each-layer --profile-backward
    --sync-tp-duplicated-parameters
memory and garbage collection: --dry-run shows what each rank holds |
    --use-torch-optimizer-for-cpu-offload --no-pin-cpu-grads --no-pin-cpu-params
    --cpu-offloading-retain-pinned-cpu-buffers --min-offloaded-tensor-size= --delay-offload-until-cuda-graph
    --delta-offload-bytes-across-pp-ranks= --activation-offload-fraction=
    --fine-grained-offloading-max-inflight-offloads= --moe-paged-stash --moe-paged-stash-page-size=
    --moe-paged-stash-buffer-size-factor-cuda= --moe-paged-stash-buffer-size-factor-cpu= --distribute-saved-activations
    --manual-gc --manual-gc-interval= --no-manual-gc-eval --disable-manual-gc-eval --empty-unused-memory-level=
    --memory-snapshot-path=
reading of data: from memory-mapped files, by --num-workers threads |
    --no-mmap-bin-files --num-dataset-builder-threads= --dataloader-fast-cache-load
    --dataloader-defer-npy-index-mmap --per-dataset-sequences-path= --object-storage-cache-path= --no-data-sharding
    --null-tokenizer-pad-id= --eval-micro-batch-size= --valid-num-workers= --max-padding-length=
writing of checkpoints: in one format, which megalite convert converts to Megatron's |
    --ckpt-format= --use-dist-ckpt --dist-ckpt-format= --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save
    --ckpt-fully-parallel-load --ckpt-fully-parallel-load-exchange-algo= --ckpt-fully-parallel-load-per-rank-objects
    --ckpt-fully-parallel-save-process-group= --ckpt-fully-parallel-load-process-group= --ckpt-pg-tensors-cache-path=
    --ckpt-pg-tensors-cache-create --no-ckpt-load-validate-sharding-integrity
    --disable-ckpt-load-validate-sharding-integrity --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load
    --dist-ckpt-save-pre-mcore-014 --distrib-optim-fully-reshardable-mem-efficient --no-save-tokenizer-assets
    --disable-save-tokenizer-assets --dist-ckpt-workers= --ckpt-drop-redundant-extra-state --async-strategy=
    --use-persistent-ckpt-worker --async-ckpt-cpu-priority= --async-ckpt-io-priority= --async-ckpt-use-cpu-shm
    --no-save-optim --ckpt-convert-update-legacy-dist-opt-format --enable-msc
non-persistent checkpoints |
    --non-persistent-save-interval= --non-persistent-ckpt-type= --non-persistent-global-ckpt-dir=
    --non-persistent-local-ckpt-dir= --non-persistent-local-ckpt-algo= --replication --replication-jump=
    --replication-factor=
restarts, watchers and reruns: the watchdog names a hanging rank, torchrun restarts |
    --inprocess-restart --inprocess-max-iterations= --inprocess-monitor-thread-interval=
    --inprocess-monitor-process-interval= --inprocess-progress-watchdog-interval= --inprocess-heartbeat-interval=
    --inprocess-soft-timeout= --inprocess-hard-timeout= --inprocess-heartbeat-timeout= --inprocess-barrier-timeout=
    --inprocess-completion-timeout= --inprocess-last-call-wait= --inprocess-termination-grace-time=
    --inprocess-granularity= --inprocess-active-world-size= --inprocess-empty-cuda-cache --enable-ft-package
    --calc-ft-timeouts --ft-num-warmup-iters= --adlr-autoresume --adlr-autoresume-interval= --flight-recorder-dump-path=
    --flight-recorder-trace-buffer-size= --no-flight-recorder-dump-on-timeout --disable-flight-recorder-dump-on-timeout
    --flight-recorder-include-stack-trace --no-flight-recorder-include-only-active
    --disable-flight-recorder-include-only-active --no-flight-recorder-extra-dump-on-exec
    --disable-flight-recorder-extra-dump-on-exec --rerun-mode= --result-rejected-tracker-filename=
    --error-injection-type= --check-for-large-grads --straggler-ctrlr-port= --straggler-minmax-count=
    --disable-straggler-on-startup --run-workload-inspector-server --test-mode
logging and profiling: see docs/visibility.md |
    --tensorboard-log-interval= --tensorboard-queue-size= --no-log-loss-scale-to-tensorboard
    --disable-log-loss-scale-to-tensorboard --log-memory-interval= --log-max-attention-logit --log-progress
    --log-optimizer-states-to-tensorboard --no-barrier-with-level-1-timing --logging-level= --log-energy --moe-routing-trace-path=
    --moe-routing-trace-max-training-iters= --moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states
    --moe-routing-trace-dump-weights --timing-log-option= --wandb-save-dir= --config-logger-dir=
    --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra
    --record-shapes --nvtx-ranges --no-one-logger --one-logger-project= --one-logger-run-name= --one-logger-async
    --app-tag-run-name= --app-tag-run-version= --otel-enabled --otel-service-name= --otel-span-groups=
generation caches the latents; each projection is one product | --cache-mla-latents --mla-down-proj-fusion
switches and names that nothing here uses |
    --enable-experimental --tokenizer-metadata= --trust-remote-code --chat-template= --DDP-impl= --export-model-type=
    --export-te-mcore-model --export-default-te-spec --export-force-local-attention --modelopt-enabled
belongs to a feature that is refused |
    --mtp-hybrid-override-pattern= --dsa-indexer-skip-topk-offset=
    --moe-upcycling-granularity= --mhc-num-residual-streams= --mhc-sinkhorn-iterations= --mhc-init-gating-factor=
    --mhc-recompute-layer-num= --fim-rate= --fim-spm-rate= --fim-split-sample= --fim-fragment-rate= --fim-no-prefix=
    --fim-prefix-token= --fim-middle-token= --fim-suffix-token= --fim-pad-token= --fim-eod-token= --logits-save-top-k=
    --logits-save-top-p= --logits-save-top-p-min-k= --logits-save-dtype= --logits-load-decode-threads=
    --logits-load-prefetch-factor= --logits-load-msc-prefetch-depth= --logits-load-kd-loss-alpha=
    --logits-load-ignore-errors --relative-attention-num-buckets= --relative-attention-max-distance= --mrope-section=*
    --lion-beta1= --lion-beta2= --fp8-interval= --fp4-recipe= --kitchen-attention-backend= --batch-invariant-backend=
    --validation-set-names=* --moe-router-padding-for-quantization --moe-router-padding-for-fp8
    --export-kd-teacher-model-config= --export-kd-teacher-ckpt-format= --finetune-data-split= --finetune-data-files=*
    --qad-train-target=
inference and reinforcement learning, which pretraining does not read |
    --inference-batch-times-seqlen-threshold= --max-tokens-to-oom= --use-legacy-static-engine --inference-max-requests=
    --inference-max-batch-size= --inference-max-seq-length= --inference-dynamic-batching
    --inference-dynamic-batching-buffer-size-gb= --inference-dynamic-batching-paused-buffer-size-gb=
    --inference-dynamic-batching-mamba-memory-ratio= --inference-dynamic-batching-block-size=
    --inference-dynamic-batching-max-requests= --inference-dynamic-batching-max-tokens=
    --inference-dynamic-batching-num-cuda-graphs= --inference-dynamic-batching-track-paused-request-events
    --inference-dynamic-batching-track-generated-token-events --decode-only-cuda-graphs
    --inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens=
    --inference-dynamic-batching-unified-memory-level= --enable-chunked-prefill --num-speculative-tokens=
    --inference-dynamic-batching-prefix-caching --no-inference-dynamic-batching-prefix-caching
    --inference-dynamic-batching-prefix-caching-eviction-policy=
    --inference-dynamic-batching-prefix-caching-coordinator-policy=
    --inference-dynamic-batching-prefix-caching-routing-alpha= --inference-dynamic-batching-prefix-caching-mamba-gb=
    --inference-dynamic-batching-cuda-graph-mixed-prefill-count=
    --inference-dynamic-batching-cuda-graph-sizing-distribution= --inference-dynamic-batching-sampling-backend=
    --use-same-sampling-seed-across-dp-ranks --inference-dynamic-batching-async-sched-mode=
    --inference-dynamic-batching-logprobs-mode= --inference-logging-step-interval= --inference-text-gen-server-logging
    --no-inference-text-gen-server-logging --inference-wandb-logging --no-inference-wandb-logging
    --inference-coordinator-port= --inference-use-synchronous-zmq-collectives
    --no-inference-use-synchronous-zmq-collectives --inference-disable-ep-consensus --no-inference-disable-ep-consensus
    --inference-shards= --flash-decode --nccl-all-reduce-for-prefill --inference-fuse-tp-communication
    --inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend=
    --inference-moe-disable-fused-quant-kernels --inference-moe-token-dispatcher-type= --mlp-chunks-for-prefill=
    --moe-enable-routing-replay --rl-prompts-per-eval= --grpo-prompts-per-step= --grpo-group-size= --rl-generation-lag=
    --rl-max-inflight-requests= --rl-submission-granularity= --rl-consumption-granularity= --rl-durable-rollout-bank
    --rl-rollout-bank-dir= --rl-rollout-bank-max-bytes= --grpo-iterations= --grpo-clamp-eps-lower=
    --grpo-clamp-eps-upper= --grpo-kl-beta= --grpo-entropy-term-weight= --grpo-filter-groups-with-same-reward
    --langrl-env-config= --rl-default-temperature= --rl-default-top-p= --rl-default-top-k=
    --rl-offload-optimizer-during-inference --rl-kv-cache-management-mode= --rl-persist-cuda-graphs
    --no-rl-persist-cuda-graphs --rl-partial-rollouts --no-rl-partial-rollouts --rl-inference-logprobs-is-correction
    --no-rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef= --rl-use-sequence-packing
    --no-rl-use-sequence-packing --rl-sequence-packing-max-sequences-per-bin= --rl-sequence-packing-algo=
    --rl-training-cuda-graphs --no-rl-training-cuda-graphs --rl-inference-tensor-model-parallel-size=
    --rl-inference-pipeline-model-parallel-size= --rl-inference-expert-model-parallel-size=
    --rl-inference-expert-tensor-model-parallel-size= --rl-inference-model-unified-memory-level=
    --rl-offload-inference-model-weights-when-idle --no-rl-offload-inference-model-weights-when-idle --refit-method=
    --rl-verify-model-weights-swap --no-rl-verify-model-weights-swap --rl-skip-bos-token --no-rl-skip-bos-token
    --rl-profile --rl-profile-dir= --rl-inference-parsers=*
settings of BERT, T5, retrieval and vision models |
    --decoder-seq-length= --sample-rate= --mask-prob= --short-seq-prob= --bert-no-binary-head --output-bert-embeddings
    --bert-embedder-type= --ict-head-size= --biencoder-projection-dim= --biencoder-shared-query-context-model
    --ict-load= --bert-load= --titles-data-path= --query-in-block-prob= --use-one-sent-docs --evidence-data-path=
    --retriever-report-topk-accuracies=* --retriever-score-scaling --block-data-path= --embedding-path=
    --indexer-batch-size= --indexer-log-interval= --num-classes= --img-h= --img-w= --num-channels= --patch-dim=
    --classes-fraction= --data-per-class-fraction= --head-lr-mult= --vision-pretraining --vision-pretraining-type=
    --vision-backbone-type= --swin-backbone-type= --mask-type= --mask-factor= --iter-per-epoch= --dino-local-img-size=
    --dino-local-crops-number= --dino-head-hidden-size= --dino-bottleneck-size= --dino-freeze-last-layer=
    --dino-norm-last-layer --dino-warmup-teacher-temp= --dino-teacher-temp= --dino-warmup-teacher-temp-epochs=
    --gdp-num-householder= --gdp-cutedsl-kernel --gdp-num-chunk-states-to-recompute=
"""
_REFUSED = r"""
this kind of attention is not supported; use attention with --num-query-groups |
    --use-kitchen-attention --qk-l2-norm --export-qk-l2-norm
scores of the indexer pass a ReLU; leave it out | --no-dsa-indexer-scoring-relu --disable-dsa-indexer-scoring-relu
layers of other kinds are not supported; see --hybrid-layer-pattern |
    --heterogeneous-layers-config-path=
    --heterogeneous-layers-config-encoded-json= --enable-mhc-connections --hybrid-attention-ratio= --hybrid-mlp-ratio=
    --embed-layernorm
it scales RoPE of ModelOpt's models alone; leave it out, or use --preset gpt-oss-20b | --enable-gpt-oss
the residual stream has the format of --precision and bypasses the norm |
    --fp32-residual-connection --apply-residual-connection-post-layernorm
this initialization is not supported; use --init-method-std for all matrices |
    --init-method-xavier-uniform --embedding-init-method-std=
it follows from --hidden-size and --mup-base-hidden-size; leave it out | --mup-width-mult=
not supported; leave it out to use the standard router |
    --moe-input-jitter-eps= --moe-use-upcycling --moe-router-force-biased=
    --moe-apply-probs-on-input --export-moe-apply-probs-on-input --moe-latent-size= --moe-expert-rank-capacity-factor=
use --recompute-granularity selective --recompute-modules moe | --moe-layer-recompute
use --apply-wd-to-qk-layernorm | --no-weight-decay-cond-type=
all weights are trained | --freeze-all-layers --freeze-base-for-mtp --mtp-detach-heads
each MTP layer is a separate layer on the last stage | --mtp-use-repeated-layer --mtp-hsm --mtp-standalone
muon multiplies in the precision of the matrix | --muon-fp32-matmul-prec=
use --nccl-max-ctas GROUP=NUMBER, such as pp=2,dp=16 | --nccl-communicator-config-path=
use --fp8-format hybrid --fp8-recipe tensorwise, for linear layers only |
    --fp8-quantizer-factory= --fp8-output-proj --fp4-format= --fp4-quantizer-factory= --te-precision-config-file=
    --kitchen-config-file= --kitchen-recipe-number=
the cross-entropy and its logits are computed in fp32 | --fp16-lm-cross-entropy --output-logit-dtype=
matrix products accumulate as in torch by default | --batch-invariant-mode
messages are formatted by the tokenizer's chat template | --sft-tokenizer-prompt-format=
samples are cut from unchanged documents; see --packing and --reset-attention-mask |
    --fim-data --dataloader-inter-document-masking --phase-transition-iterations= --hybrid-context-parallel
batch sizes must be multiples of --micro-batch-size times the data-parallel size | --decrease-batch-size-if-needed
there is one validation set, evaluated from the start; megalite evaluate measures others |
    --multiple-validation-sets --start-eval-at-iter=
use megalite evaluate | --skip-train
use --exit-file | --kill-switch-path= --trigger-path=
use --train-samples, --lr-decay-samples and --lr-warmup-samples: tokens divided by --seq-length |
    --train-tokens= --lr-decay-tokens= --lr-warmup-tokens=
use --train-data-path, --valid-data-path and --test-data-path |
    --train-weighted-split-paths=* --valid-weighted-split-paths=* --test-weighted-split-paths=*
    --train-weighted-split-paths-path= --valid-weighted-split-paths-path= --test-weighted-split-paths-path=
the tokenizer is not taken from the checkpoint; use --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER |
    --patch-tokenizer-type=
use --vocab-size with the sum of the tokenizer's size and this, and --no-pad-vocab-size | --extra-vocab-size=
not taken from the checkpoint; use --load FOLDER --finetune, and set the layout with --tp and --pp |
    --pretrained-checkpoint= --use-mp-args-from-checkpoint-args --load-main-params-from-ckpt --override-ckpt-iteration=
use megalite convert | --ckpt-convert-format= --ckpt-convert-save=
such files are not written; megalite inspect shows the contents of a checkpoint |
    --save-params-interval= --save-activations-interval= --save-tokens-per-expert-interval= --save-wgrads-interval=
    --save-dgrads-interval= --logits-save-dir=
distillation and quantization are not supported |
    --logits-load-dir= --export-kd-cfg= --export-kd-teacher-load= --export-quant-cfg= --export-real-quant-cfg=
    --export-kv-cache-quant --export-legacy-megatron --export-offline-model --finetune-hf-dataset=
the tokenizer defines size and special tokens; use --vocab-size and --make-vocab-size-divisible-by |
    --tokenizer-special-tokens=* --tiktoken-num-special-tokens= --tokenizer-sentencepiece-legacy
    --null-tokenizer-eod-id=
no faults are injected |
    --fault-injector-ranks= --fault-injector-num-ranks= --fault-injector-fault-types=
    --fault-injector-fault-probabilities= --fault-injector-fault-delay= --fault-injector-delay-start-iteration=
    --fault-injector-mtti-seconds= --fault-injector-offset-seconds= --fault-injector-seed=
reinforcement learning is not supported | --perform-rl-step
Megatron-LM has replaced it; use --tp, --micro-batch-size, --lr-warmup-fraction, --num-layers or --seq-length |
    --model-parallel-size= --batch-size= --warmup= --encoder-num-layers= --decoder-num-layers= --encoder-seq-length=
use --config FILE | --yaml-cfg=
"""

FP8 = "fp8 scales come from the current tensors, without a history; first and last layer, experts and head are in bf16"
_DIFFERS = f"""
{FP8} | --fp8-amax-history-len= --fp8-amax-compute-algo=
bf16 matrix products accumulate as in torch by default | --disable-bf16-reduced-precision-matmul
DeepSpeed's file is not read: flags set precision, loss scale, clipping and batch sizes | --deepspeed-config=
"""


@dataclass(frozen=True)
class Known:
    """A flag of the table."""

    flag: str
    kind: str
    """Class of the flag."""
    why: str
    values: str | None
    """Values: None: none; `*`: any number; else one. They must match this regular expression, or that after `*`."""

    def judge(self, words: Sequence[str], where: str) -> "Note":
        """Return the note for the flag with these words. Raises ConfigError: it is refused, or takes another number of
        words; the message starts with `where`."""
        if self.values is None and words:
            raise ConfigError(f"{where} takes no value, got {' '.join(words)}; remove it")
        if self.values and not self.values.startswith("*") and len(words) != 1:
            raise ConfigError(f"{where} takes one value, got {' '.join(words) or 'none'}")
        given = " ".join((where, *words))
        if self.kind == REFUSED:
            raise ConfigError(f"{given} is refused: {self.why}")
        if self.values and not re.fullmatch(self.values.removeprefix("*") or ".*", " ".join(words)):
            raise ConfigError(f"{given} is refused: {self.why}; leave it out")
        return Note(given if self.kind == DIFFERS else self.flag, self.kind, self.why)


@dataclass(frozen=True)
class Note:
    """A flag or value that was accepted without being a setting, for the summary line."""

    what: str
    kind: str
    why: str


@cache
def known_flags() -> Mapping[str, Known]:
    """Return flag -> its row."""
    table: dict[str, Known] = {}
    for kind, rows in (
        (ALREADY_SO, _ALREADY_SO),
        (NO_EFFECT_HERE, _NO_EFFECT),
        (REFUSED, _REFUSED),
        (DIFFERS, _DIFFERS),
    ):
        for row in rows.strip().replace("\n   ", "").splitlines():
            why, _, flags = row.partition(" | ")
            for word in flags.split():
                flag, takes, values = word.partition("=")
                assert flag not in table, flag
                table[flag] = Known(flag, kind, why, (values or ".*") if takes else None)
    return table


def summary(notes: Sequence[Note]) -> list[str]:
    """Return one line for everything accepted without being a setting, and one line for each difference."""
    accepted = {
        kind: {note.what: note.why for note in notes if note.kind == kind} for kind in (ALREADY_SO, NO_EFFECT_HERE)
    }
    reasons = {why for of_kind in accepted.values() for why in of_kind.values()}
    why = reasons.pop() if len(reasons) == 1 else "megalite port says why"
    parts = [f"{kind}: {' '.join(names)}" for kind, names in accepted.items() if names]
    lines = [f"{'; '.join(parts)} ({why})"] if parts else []
    differences: dict[str, dict[str, None]] = {}
    for note in notes:
        if note.kind == DIFFERS:
            differences.setdefault(note.why, {})[note.what] = None
    return lines + [f"{', '.join(names)}: {why}" for why, names in differences.items()]
