#!/bin/bash
# A launch script for Megatron-LM, as `megalite port` reads it (docs/from_megatron.md).
#   train_gpt.sh CHECKPOINTS [DATA]
export CUDA_DEVICE_MAX_CONNECTIONS=1

CHECKPOINTS=$1
DATA_PATH=${2:-corpus_text_document}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODES=${SLURM_NNODES:-1}
TP=2

LAUNCH=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NODES
)
MODEL=(
    --use-mcore-models
    --num-layers 12 --hidden-size 512 --num-attention-heads 8
    --seq-length 1024 --max-position-embeddings 1024
    --attention-backend auto   # or flash, fused, unfused
)
TRAINING=(
    --micro-batch-size 4 --global-batch-size $((GPUS_PER_NODE * NODES * 4))
    --train-iters 100 --lr 1.5e-4 --min-lr 1e-5 --lr-warmup-fraction .01 --lr-decay-style cosine
    --bf16 --clip-grad 1.0 --weight-decay 0.01 --no-gradient-accumulation-fusion
    --tokenizer-type NullTokenizer --vocab-size 50257
)
if [ "$TP" -gt 1 ]; then
    TRAINING+=(--tensor-model-parallel-size $TP "--sequence-parallel")
fi

torchrun "${LAUNCH[@]}" pretrain_gpt.py \
    ${MODEL[@]} \
    ${TRAINING[@]} \
    --data-path $DATA_PATH --split 949,50,1 \
    --save $CHECKPOINTS --load $CHECKPOINTS --save-interval 50 --log-throughput --log-params-norm
