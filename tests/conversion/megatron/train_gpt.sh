#!/bin/bash
# A run of Megatron-LM that moves to megalite: tensor and pipeline parallelism, the distributed optimizer in buckets, tied
# embeddings, linear decay without a warm-up. migration.py runs it, `megalite port` reads it.
#   train_gpt.sh CHECKPOINTS DATA TOKENIZER
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=2
PP=2

MODEL="--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 \
    --transformer-impl local --attention-backend unfused --attention-dropout 0 --hidden-dropout 0"
TRAINING="--micro-batch-size 2 --global-batch-size 8 --train-iters 30 --seed 77 --lr 5e-3 --min-lr 5e-4 --weight-decay 0.1"
SWITCHES="--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm \
    --disable-jit-fuser --distributed-backend gloo --num-workers 0 --use-cpu-initialization"

torchrun --nproc-per-node $((TP * PP)) ${ON_CPU:-} pretrain_gpt.py $MODEL $TRAINING $SWITCHES ${MORE:-} \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \
    --use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 600 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model $3 --make-vocab-size-divisible-by 4 \
    --data-path $2 --split 90,10,0 --eval-iters 0 --eval-interval 1000 \
    --save $1 --load $1 --save-interval 10 --log-interval 1
