#!/usr/bin/env bash
# verl's GRPO as it is, with its rollouts on the devices of a ROSE gateway; docs/integrations.md.
#
# Each `rose` in a terminal of its own, all with the same ROSE_RELAY_SECRET and ROSE_TRAINER_TOKEN (openssl rand -hex 32):
#     rose gateway MODEL --port 8002 --set max_staleness=1 --ledger ledger.sqlite
#     rose relay up --folder relay                                 # or RELAY=a folder that all machines share
#     rose serve --lend MODEL --gateway http://127.0.0.1:8002      # a worker; start as many as you like
#     examples/verl.sh MODEL train.parquet test.parquet            # may be followed by more settings of verl
#
# The lines of ROSE are all that another command of verl needs. The trainer itself needs a GPU.
set -euo pipefail

MODEL=$1 TRAIN=$2 TEST=$3
GATEWAY=${GATEWAY:-http://127.0.0.1:8002} RELAY=${RELAY:-http://127.0.0.1:7070}
ENGINE=actor_rollout_ref.rollout.checkpoint_engine

ROSE=(
  actor_rollout_ref.rollout.name=rose  # the pool instead of replicas of verl's own
  +actor_rollout_ref.rollout.agent.agent_loop_manager_class=rose.adapters.verl_rollouts.RoseAgentLoopManager
  $ENGINE.backend=rose                 # publish weights instead of sending them
  "+$ENGINE.engine_kwargs.rose={model:'$MODEL',gateway:'$GATEWAY',relay:'$RELAY',run:my-run}"
  trainer.v1.trainer_mode=separate_async actor_rollout_ref.hybrid_engine=False  # no rollouts on the trainer's GPUs
)

exec "${PYTHON:-python3}" -m verl.trainer.main_ppo "${ROSE[@]}" \
  actor_rollout_ref.rollout.nnodes=1 \
  actor_rollout_ref.rollout.n_gpus_per_node=1 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  algorithm.adv_estimator=grpo \
  trainer.v1.separate_async.parameter_sync_step=1 \
  data.train_files="$TRAIN" \
  data.val_files="$TEST" \
  data.train_batch_size=64 \
  data.max_prompt_length=1024 \
  data.max_response_length=2048 \
  trainer.n_gpus_per_node="${GPUS:-1}" \
  trainer.logger=console \
  trainer.total_epochs=1 \
  "${@:4}"
