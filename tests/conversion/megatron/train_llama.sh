#!/bin/bash
# A run of Megatron-LM that moves to megalite: one rank, a Llama. migration.py runs it, `megalite port` reads it.
#   train_llama.sh CHECKPOINTS DATA TOKENIZER
MODEL=(
    --num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32
    --transformer-impl local --attention-backend unfused --disable-bias-linear --swiglu --ffn-hidden-size 16
    --normalization RMSNorm --use-rotary-position-embeddings --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)
TRAINING=(
    --micro-batch-size 2 --global-batch-size 8 --train-iters 30 --seed 1234 --adam-beta2 0.95
    --lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 --clip-grad 1.0
)
SWITCHES=(
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion
    --disable-jit-fuser --distributed-backend gloo --num-workers 0 --use-cpu-initialization
)
torchrun --nproc-per-node 1 ${ON_CPU:-} pretrain_gpt.py \
    ${MODEL[@]} ${TRAINING[@]} ${SWITCHES[@]} ${MORE:-} \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model $3 --make-vocab-size-divisible-by 4 \
    --data-path $2 --split 90,10,0 --eval-iters 0 --eval-interval 1000 \
    --save $1 --load $1 --save-interval 10 --log-interval 1
