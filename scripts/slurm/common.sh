# shellcheck shell=bash disable=SC2016,SC2034,SC2119,SC2120
# Functions of the Slurm scripts beside this file; sourced, never run.
#
# Settings are environment variables, which sbatch hands to the job:
#
#   Where the software is: a virtual environment, unless a container is named.
#     MEGATRON_RETOOL_VENV              virtual environment on the shared file system ($MEGATRON_RETOOL_ROOT/.venv)
#     MEGATRON_RETOOL_CONTAINER         image built from docker/Dockerfile: a .sqsh file or registry name (pyxis/enroot),
#                                       or a .sif file (apptainer)
#     MEGATRON_RETOOL_CONTAINER_RUNTIME pyxis | apptainer (apptainer for .sif, pyxis otherwise)
#     MEGATRON_RETOOL_CONTAINER_MOUNTS  further mounts, SRC:DST[,SRC:DST…]; the repository, the run's directory and the
#                                       node-local directory are mounted anyway
#     MEGATRON_RETOOL_ROOT              the repository, on the shared file system (where sbatch was called)
#   The nodes
#     MEGATRON_RETOOL_NCCL_ENV          NCCL and InfiniBand settings (scripts/slurm/nccl.env)
#     MEGATRON_RETOOL_INTERFACE         network interface of Ray and the rendezvous (the one towards the head node)
#     MEGATRON_RETOOL_LOCAL_DIR         node-local directory with a short path (/tmp)
#     MEGATRON_RETOOL_NODE_TIMEOUT      seconds until every node must have joined (300)
#     MEGATRON_RETOOL_EXCLUSIVE         1: no other job runs on these nodes, stale Ray processes are ended (1); 0: shared
#   The run
#     MEGATRON_RETOOL_COMMAND           another command than `python -m megatron_retool pipeline`; gets the same arguments
#     MEGATRON_RETOOL_FRUITLESS_STARTS  starts in a row without a new checkpoint after which a job is not requeued (3)
#     MEGATRON_RETOOL_REQUEUE_ON_ERROR  1: requeue after an error of the driver too, not only after lost nodes (0)

# shellcheck source=scripts/usage.sh
[[ "${BASH_SOURCE[0]}" != "$0" ]] || source "$(dirname "$0")/../usage.sh" # read by hand, as in `bash FILE --help`

RAY_STEPS=()   # srun's processes that hold Ray
LEAVING=""     # the signal that asked this job to leave
LOST=""        # why nodes of this job count as lost
DRIVER=""      # srun's process that holds the driver
DRIVER_CODE=1  # the driver's exit code
REQUEUE=""     # whether the driver asks for a requeue: it has checkpointed, and there is more to do

log() { echo "[$(date '+%F %T')] $*"; }

die() {
  log "error: $*" >&2
  exit 1
}

# Fills in the settings above. Called with the directory of the calling script, if it is the one in the repository.
load_settings() {
  local candidate
  for candidate in "${MEGATRON_RETOOL_ROOT:-}" "${1:-}" "${SLURM_SUBMIT_DIR:-}" "$PWD"; do
    if [[ -n "$candidate" && -f "$candidate/scripts/slurm/common.sh" ]]; then
      MEGATRON_RETOOL_ROOT="$(cd "$candidate" && pwd)"
      break
    fi
  done
  : "${MEGATRON_RETOOL_ROOT:?the repository was not found: call sbatch in it, or set MEGATRON_RETOOL_ROOT}"
  : "${MEGATRON_RETOOL_VENV:=$MEGATRON_RETOOL_ROOT/.venv}"
  : "${MEGATRON_RETOOL_CONTAINER:=}"
  : "${MEGATRON_RETOOL_CONTAINER_MOUNTS:=}"
  : "${MEGATRON_RETOOL_NCCL_ENV:=$MEGATRON_RETOOL_ROOT/scripts/slurm/nccl.env}"
  : "${MEGATRON_RETOOL_LOCAL_DIR:=/tmp}"
  : "${MEGATRON_RETOOL_NODE_TIMEOUT:=300}"
  : "${MEGATRON_RETOOL_EXCLUSIVE:=1}"
  : "${MEGATRON_RETOOL_FRUITLESS_STARTS:=3}"
  : "${MEGATRON_RETOOL_REQUEUE_ON_ERROR:=0}"
  if [[ -z "${MEGATRON_RETOOL_CONTAINER_RUNTIME:-}" ]]; then
    MEGATRON_RETOOL_CONTAINER_RUNTIME=pyxis
    [[ "$MEGATRON_RETOOL_CONTAINER" != *.sif ]] || MEGATRON_RETOOL_CONTAINER_RUNTIME=apptainer
  fi
  if [[ -n "$MEGATRON_RETOOL_CONTAINER" ]]; then
    MEGATRON_RETOOL_PYTHON=python MEGATRON_RETOOL_RAY=ray
  else
    MEGATRON_RETOOL_PYTHON="$MEGATRON_RETOOL_VENV/bin/python" MEGATRON_RETOOL_RAY="$MEGATRON_RETOOL_VENV/bin/ray"
    [[ -x "$MEGATRON_RETOOL_PYTHON" ]] ||
      die "$MEGATRON_RETOOL_PYTHON does not exist: run scripts/setup.sh, or set MEGATRON_RETOOL_VENV or MEGATRON_RETOOL_CONTAINER"
  fi
  local name
  for name in ROOT NCCL_ENV LOCAL_DIR NODE_TIMEOUT EXCLUSIVE PYTHON RAY; do
    export "MEGATRON_RETOOL_${name?}"
  done
}

# Splits the job's arguments into CONFIG and OVERRIDES.
parse_arguments() {
  CONFIG="$MEGATRON_RETOOL_ROOT/configs/demo_cpu.yaml"
  OVERRIDES=()
  while (($#)); do
    case "$1" in
      --config) CONFIG="${2:?--config needs a file}" && shift 2 ;;
      --config=*) CONFIG="${1#*=}" && shift ;;
      -*) die "unknown option $1: --config FILE and dotted.key=value are known" ;;
      *=*) OVERRIDES+=("$1") && shift ;;
      *) die "$1 is neither --config FILE nor dotted.key=value" ;;
    esac
  done
  CONFIG="$(realpath -- "$CONFIG")"
  [[ -f "$CONFIG" ]] || die "config file $CONFIG does not exist"
}

# Splits the arguments of submit.sh and interactive.sh: CONFIG, OVERRIDES, SUBMIT_NODES, SUBMIT_GPUS, SFT, DRY_RUN,
# SLURM_OPTIONS (passed on) and COMMAND (what follows --).
parse_submission() {
  local own=()
  SUBMIT_NODES="" SUBMIT_GPUS="" SFT="" DRY_RUN="" SLURM_OPTIONS=() COMMAND=()
  while (($#)); do
    case "$1" in
      --config) own+=("$1" "${2:?--config needs a file}") && shift 2 ;;
      --config=*) own+=("$1") && shift ;;
      --nodes | -N) SUBMIT_NODES="${2:?$1 needs a number}" && shift 2 ;;
      --nodes=*) SUBMIT_NODES="${1#*=}" && shift ;;
      --gpus-per-node) SUBMIT_GPUS="${2:?$1 needs a number}" && shift 2 ;;
      --gpus-per-node=*) SUBMIT_GPUS="${1#*=}" && shift ;;
      --sft) SFT=1 && shift ;;
      --dry-run) DRY_RUN=1 && shift ;;
      --) COMMAND=("${@:2}") && break ;;
      --*) SLURM_OPTIONS+=("$1") && shift ;;
      -*) die "$1: options for Slurm are written out, --option=value" ;;
      *=*) own+=("$1") && shift ;;
      *) die "$1 is no dotted.key=value; options for Slurm are written --option=value" ;;
    esac
  done
  parse_arguments "${own[@]}"
}

# Checks the configuration against the nodes that are asked for: RUN_DIR, EXPERIMENT, ALLOCATION_OPTIONS.
check_submission() {
  local check=(--config "$CONFIG") values gpus
  [[ -z "$SFT" ]] || check+=(--sft)
  [[ -z "$SUBMIT_NODES" ]] || check+=(--nodes "$SUBMIT_NODES")
  # GPU types and names belong to Slurm: h100:8 counts as 8.
  [[ -z "$SUBMIT_GPUS" ]] || check+=(--gpus-per-node "${SUBMIT_GPUS##*:}")
  local CONTAINER_FLAGS=() CONTAINER_PREFIX=()
  if [[ -n "$MEGATRON_RETOOL_CONTAINER" && "$MEGATRON_RETOOL_CONTAINER_RUNTIME" == pyxis ]]; then
    # Only jobs have pyxis: here the check needs a Python of the login node.
    MEGATRON_RETOOL_PYTHON="$MEGATRON_RETOOL_VENV/bin/python"
    [[ -x "$MEGATRON_RETOOL_PYTHON" ]] || MEGATRON_RETOOL_PYTHON=python3
  else
    prepare_container
  fi
  values="$(cd "$MEGATRON_RETOOL_ROOT" && "${CONTAINER_PREFIX[@]}" "$MEGATRON_RETOOL_PYTHON" -m \
    megatron_retool.cluster.allocation "${check[@]}" --print run_dir,experiment_name,nodes,gpus_per_node "${OVERRIDES[@]}")" ||
    die "not submitted: see above"
  { read -r RUN_DIR && read -r EXPERIMENT && read -r SUBMIT_NODES && read -r gpus; } <<<"$values"
  ALLOCATION_OPTIONS=(--nodes="$SUBMIT_NODES")
  # Clusters that count GPUs in their own way get the user's --gres in its place.
  if ((gpus)) && [[ " ${SLURM_OPTIONS[*]} " != *" --gres"* && " ${SLURM_OPTIONS[*]} " != *" --gpus"* ]]; then
    ALLOCATION_OPTIONS+=(--gpus-per-node="${SUBMIT_GPUS:-$gpus}")
  fi
  export MEGATRON_RETOOL_ROOT
}

# Fills CONTAINER_FLAGS (for srun) and CONTAINER_PREFIX (before the command).
prepare_container() {
  CONTAINER_FLAGS=()
  CONTAINER_PREFIX=()
  [[ -n "$MEGATRON_RETOOL_CONTAINER" ]] || return 0
  local mounts="$MEGATRON_RETOOL_ROOT:$MEGATRON_RETOOL_ROOT,$MEGATRON_RETOOL_LOCAL_DIR:$MEGATRON_RETOOL_LOCAL_DIR"
  [[ -z "${RUN_DIR:-}" ]] || mounts+=",$RUN_DIR:$RUN_DIR"
  mounts+="${MEGATRON_RETOOL_CONTAINER_MOUNTS:+,$MEGATRON_RETOOL_CONTAINER_MOUNTS}"
  case "$MEGATRON_RETOOL_CONTAINER_RUNTIME" in
    pyxis)
      # A named container is unpacked once on each node and shared by the steps that follow.
      CONTAINER_FLAGS=(
        --container-image="$MEGATRON_RETOOL_CONTAINER" --container-name="megatron_retool_$SLURM_JOB_ID"
        --container-mounts="$mounts" --container-workdir="$MEGATRON_RETOOL_ROOT" --no-container-mount-home
      )
      ;;
    apptainer)
      CONTAINER_PREFIX=(apptainer exec --nv --bind "$mounts" --pwd "$MEGATRON_RETOOL_ROOT" "$MEGATRON_RETOOL_CONTAINER")
      ;;
    *) die "MEGATRON_RETOOL_CONTAINER_RUNTIME=$MEGATRON_RETOOL_CONTAINER_RUNTIME is neither pyxis nor apptainer" ;;
  esac
}

# build_step NODES TASKS_PER_NODE [srun options …] fills STEP: srun up to and including the container.
build_step() {
  local nodes=() list="$1" tasks="$2"
  IFS=, read -ra nodes <<<"$list"
  # Without explicit CPUs and memory the first step takes one core, or all memory, and the next waits for ever. Not
  # --unbuffered: it gives the driver a terminal, and the job's output a picture of every frame of a progress line.
  STEP=(
    srun --overlap --nodes="${#nodes[@]}" --ntasks="$((${#nodes[@]} * tasks))" --ntasks-per-node="$tasks" --nodelist="$list"
    --cpus-per-task="$(((SLURM_CPUS_ON_NODE + tasks - 1) / tasks))" --cpu-bind=none --mem=0 --distribution=block
    --kill-on-bad-exit=1 "${@:3}" "${CONTAINER_FLAGS[@]}" "${CONTAINER_PREFIX[@]}"
  )
}

# Nodes, addresses and the run's directory: NODES, HEAD, WORKERS, HEAD_ADDRESS, PORT, RUN_DIR, LOGS, GPUS_PER_NODE,
# WORLD_SIZE. The argument --sft checks a fine-tuning run.
prepare_job() {
  cd "$MEGATRON_RETOOL_ROOT" || exit 1 # relative paths in configurations start here
  unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU # srun refuses them beside --mem
  mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  HEAD="${NODES[0]}"
  WORKERS=("${NODES[@]:1}")
  NODE_LIST="$(IFS=,; echo "${NODES[*]}")"
  local check=() values=() peer interface_flag=()
  [[ -z "${1:-}" ]] || check+=("$1")
  [[ -z "${SLURM_GPUS_ON_NODE:-}" ]] || check+=(--gpus-per-node "$SLURM_GPUS_ON_NODE")
  [[ -z "${MEGATRON_RETOOL_INTERFACE:-}" ]] || interface_flag=(--interface "$MEGATRON_RETOOL_INTERFACE")
  export PYTHONPATH="$MEGATRON_RETOOL_ROOT${PYTHONPATH:+:$PYTHONPATH}"

  prepare_container
  build_step "$HEAD" 1
  values=("$("${STEP[@]}" "$MEGATRON_RETOOL_PYTHON" -m megatron_retool.cluster.allocation --config "$CONFIG" \
    --nodes "${#NODES[@]}" "${check[@]}" --print run_dir,gpus_per_node,world_size "${OVERRIDES[@]}" </dev/null)") ||
    die "the configuration does not fit this allocation (or Python does not start on $HEAD): see above"
  mapfile -t values <<<"${values[0]}"
  RUN_DIR="${values[0]}" GPUS_PER_NODE="${values[1]}" WORLD_SIZE="${values[2]}"
  LOGS="$RUN_DIR/logs"
  export MEGATRON_RETOOL_CONTROL_DIR="$LOGS/.slurm_$SLURM_JOB_ID"
  rm -rf "$MEGATRON_RETOOL_CONTROL_DIR"
  mkdir -p "$MEGATRON_RETOOL_CONTROL_DIR"
  # Whoever reaches Ray's ports can run code as this user: every process of the job must show the job's own token.
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$MEGATRON_RETOOL_CONTROL_DIR/ray_token"
  (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")
  prepare_container # with the run's directory

  # The address by which Slurm itself reaches the second node tells the network that all nodes share.
  peer="$(scontrol show node "${NODES[1]:-$HEAD}" | grep -oP 'NodeAddr=\K\S+')"
  build_step "$HEAD" 1
  values=("$("${STEP[@]}" "$MEGATRON_RETOOL_PYTHON" -m megatron_retool.cluster.network "${interface_flag[@]}" "$peer" </dev/null)") ||
    die "$HEAD has no address that ${NODES[1]:-$HEAD} can reach: see above"
  read -r HEAD_ADDRESS _ PORT <<<"${values[0]}"
  export MEGATRON_RETOOL_HEAD_ADDRESS="$HEAD_ADDRESS"
  log "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $NODE_LIST; head $HEAD ($HEAD_ADDRESS); run $RUN_DIR"
  log "$SLURM_JOB_ID $(newest_checkpoint)" >>"$LOGS/slurm_starts.txt"
}

# --- Ray -------------------------------------------------------------------------------------------------------------

# Starts Ray on all nodes in the background, each node's output in logs/ray_<node>.log.
start_ray() {
  export RAY_ADDRESS="$HEAD_ADDRESS:$PORT"
  local output=(--output="$LOGS/ray_%N.log" --open-mode=append)
  build_step "$HEAD" 1 --job-name=ray-head "${output[@]}"
  "${STEP[@]}" bash "$MEGATRON_RETOOL_ROOT/scripts/slurm/ray_node.sh" head </dev/null &
  RAY_STEPS+=($!)
  if ((${#WORKERS[@]})); then
    build_step "$(IFS=,; echo "${WORKERS[*]}")" 1 --job-name=ray-workers "${output[@]}"
    "${STEP[@]}" bash "$MEGATRON_RETOOL_ROOT/scripts/slurm/ray_node.sh" worker </dev/null &
    RAY_STEPS+=($!)
  fi
}

# Whether Ray has ended on any node.
ray_ended() {
  local step
  for step in "${RAY_STEPS[@]}"; do
    kill -0 "$step" 2>/dev/null || return 0
  done
  return 1
}

# Waits until all nodes have joined with their GPUs; fails, naming nodes, after MEGATRON_RETOOL_NODE_TIMEOUT seconds.
wait_for_ray() {
  local waiter code=0
  build_step "$HEAD" 1 --job-name=ray-wait
  "${STEP[@]}" "$MEGATRON_RETOOL_PYTHON" -m megatron_retool.cluster.ray_nodes --address "$RAY_ADDRESS" \
    --expect "$NODE_LIST" --gpus-per-node "$GPUS_PER_NODE" --timeout "$MEGATRON_RETOOL_NODE_TIMEOUT" </dev/null &
  waiter=$!
  while kill -0 "$waiter" 2>/dev/null; do
    if ray_ended || [[ -n "$LEAVING" ]]; then
      kill -TERM "$waiter" 2>/dev/null || true
      wait "$waiter" || true
      return 1
    fi
    sleep 0.5
  done
  wait "$waiter" || code=$?
  ((code == 0)) || log "error: not every node joined Ray; their output is in $LOGS/ray_<node>.log" >&2
  return "$code"
}

# Stops Ray and removes what this start kept for its own use.
clean_up() {
  stop_ray
  rm -rf "$MEGATRON_RETOOL_CONTROL_DIR"
}

# Ends Ray on every node, and at last by force: Slurm would otherwise wait half a minute for it when the job ends.
stop_ray() {
  ((${#RAY_STEPS[@]})) || return 0
  touch "$MEGATRON_RETOOL_CONTROL_DIR/stopping"
  build_step "$NODE_LIST" 1 --job-name=ray-stop --kill-on-bad-exit=0
  timeout --kill-after=5 30 "${STEP[@]}" bash "$MEGATRON_RETOOL_ROOT/scripts/slurm/ray_node.sh" stop </dev/null || true
  local step
  for step in "${RAY_STEPS[@]}"; do
    for _ in $(seq 50); do
      kill -0 "$step" 2>/dev/null || break
      sleep 0.2
    done
    kill -TERM "$step" 2>/dev/null || true
    wait "$step" 2>/dev/null || true
  done
  RAY_STEPS=()
}

# --- the driver ------------------------------------------------------------------------------------------------------

# start_driver NODES TASKS_PER_NODE COMMAND… starts the command in the background; DRIVER is srun's process.
start_driver() {
  DRIVER_NODES="$1"
  build_step "$1" "$2" --job-name=driver
  "${STEP[@]}" bash "$MEGATRON_RETOOL_ROOT/scripts/slurm/driver_task.sh" "${@:3}" </dev/null &
  DRIVER=$!
}

# signal_driver SIGNAL. srun would hand a signal to every process of the step, and so end the sandbox and the reward
# workers: it goes to the driver's own processes instead, by their ids.
signal_driver() {
  local script='for file in "$MEGATRON_RETOOL_CONTROL_DIR"/driver.*."$SLURMD_NODENAME"; do
    [[ ! -f "$file" ]] || kill "-$1" "$(<"$file")" 2>/dev/null || true
  done'
  if [[ "$DRIVER_NODES" == "${SLURMD_NODENAME:-}" ]]; then
    bash -c "$script" signal_driver "$1"
  else
    local CONTAINER_FLAGS=() CONTAINER_PREFIX=()
    build_step "$DRIVER_NODES" 1 --job-name=signal --kill-on-bad-exit=0
    timeout 30 "${STEP[@]}" bash -c "$script" signal_driver "$1" </dev/null || true
  fi
}

# The trap of USR1 and TERM.
leave() {
  [[ -z "$LEAVING" ]] || return 0
  LEAVING="$1"
  log "SIG$1: the driver shall finish its step, checkpoint and leave"
}

# The job's state; RUNNING where slurmctld does not answer, for then nothing is ending it.
job_state() {
  local state
  state="$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null)" || true
  echo "${state:-RUNNING}"
}

# Unix time until which the driver may take to leave: what Slurm leaves this job, less the time that stopping takes.
leave_deadline() {
  local end="${SLURM_JOB_END_TIME:-}"
  if [[ -z "$end" ]]; then
    end="$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e 2>/dev/null)" || true
    [[ "$end" != *T* ]] || end="$(date -d "$end" +%s)"
  fi
  [[ "$end" =~ ^[0-9]+$ ]] || end=9999999999 # no limit
  echo "$((end - 45))"
}

# Whether any process of the driver has come to life.
driver_launched() { compgen -G "$MEGATRON_RETOOL_CONTROL_DIR/driver.*" >/dev/null; }

# Waits for the driver, hands it the signal to leave, and ends it when a node is lost or time is up. Sets DRIVER_CODE.
supervise() {
  local asked="" stop_at=9999999999 stopping=""
  while kill -0 "$DRIVER" 2>/dev/null; do
    if [[ -n "$LEAVING" && -z "$asked" ]] && driver_launched; then
      asked=1
      stop_at="$(leave_deadline)"
      if [[ "$(job_state)" == RUNNING ]]; then
        signal_driver USR1
      else
        stop_at=0 # cancelled, preempted or failed: Slurm has begun to end every process
      fi
    fi
    if [[ -z "$LOST" ]] && ray_ended; then
      LOST="Ray ended on $(node_ended)"
      log "$LOST: ending the driver"
      stop_at=0
    fi
    if [[ -z "$stopping" ]] && (($(date +%s) >= stop_at)); then
      stopping=1
      [[ -n "$LOST" ]] || log "no time left: ending the driver; the run resumes from its last checkpoint"
      signal_driver TERM
      stop_at=$(($(date +%s) + 20))
    elif [[ "$stopping" == 1 ]] && (($(date +%s) >= stop_at)); then
      stopping=2
      signal_driver KILL
      kill -TERM "$DRIVER" 2>/dev/null || true
    fi
    sleep 0.5
  done
  DRIVER_CODE=0
  wait "$DRIVER" || DRIVER_CODE=$?
  [[ ! -f "$MEGATRON_RETOOL_CONTROL_DIR/requeue" ]] || REQUEUE=1
  FAILED_RANK=""
  if [[ "$DRIVER_CODE" != 0 && "${SLURM_RESTART_COUNT:-0}" != 0 ]] && ! driver_launched; then
    LOST="${LOST:-srun could not start the driver}" # it could before, so a node is at fault and not the settings
  elif [[ -f "$MEGATRON_RETOOL_CONTROL_DIR/failed" ]]; then
    read -r DRIVER_CODE FAILED_RANK <"$MEGATRON_RETOOL_CONTROL_DIR/failed"
  fi
}

# The node on which Ray ended first, by itself.
node_ended() {
  local file first=""
  for file in "$MEGATRON_RETOOL_CONTROL_DIR"/*.ended; do
    [[ ! -f "$file" ]] || [[ -n "$first" && "$first" -ot "$file" ]] || first="$file"
  done
  if [[ -n "$first" ]]; then
    echo "$(basename "$first" .ended) (exit code $(<"$first"))"
  else
    echo "a node that srun names above"
  fi
}

# Names of the nodes on which Slurm cannot start a process any more.
unreachable_nodes() {
  local node
  for node in "${NODES[@]}"; do
    (timeout --kill-after=5 30 srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --mem=0 true \
      </dev/null >/dev/null 2>&1 || echo "$node") &
  done
  wait
}

# --- the end of a job ------------------------------------------------------------------------------------------------

# What the run's last complete result is, as one word.
newest_checkpoint() {
  find "$RUN_DIR" -maxdepth 6 -name COMPLETE -printf '%T@:%P\n' 2>/dev/null | sort -n | tail -1 | grep . || echo none
}

# Whether this job's last starts all ended where they began.
without_progress() {
  local starts
  mapfile -t starts < <(grep " $SLURM_JOB_ID " "$LOGS/slurm_starts.txt" | tail -n "$MEGATRON_RETOOL_FRUITLESS_STARTS" |
    awk '{ print $NF }')
  ((${#starts[@]} >= MEGATRON_RETOOL_FRUITLESS_STARTS)) || return 1
  [[ "$(printf '%s\n' "${starts[@]}" "$(newest_checkpoint)" | sort -u | wc -l)" == 1 ]]
}

# Puts the job back into the queue, under the same id. Never returns.
requeue() {
  if without_progress; then
    log "error: $MEGATRON_RETOOL_FRUITLESS_STARTS starts in a row made no checkpoint (the last: $1): not requeued" >&2
    exit 1
  fi
  log "$1: requeued, to resume from the last checkpoint"
  trap '' TERM # with which Slurm ends this start
  for _ in 1 2 3 4 5; do
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    sleep 10 # slurmctld may be restarting
  done
  die "scontrol requeue was refused: is the job submitted with --no-requeue?"
}

# Stops what runs, then ends the job or requeues it. Never returns.
finish() {
  local state unreachable=""
  state="$(job_state)"
  if [[ "$state" != RUNNING ]]; then
    log "Slurm is ending this job ($state)"
    clean_up
    exit "$DRIVER_CODE"
  fi
  if [[ "$DRIVER_CODE" != 0 && -z "$LOST$LEAVING" && -n "$DRIVER" ]]; then
    log "the driver ended with exit code $DRIVER_CODE${FAILED_RANK:+ ($FAILED_RANK)}"
    unreachable="$(unreachable_nodes | paste -sd,)"
    [[ -z "$unreachable" ]] || LOST="Slurm does not reach $unreachable any more"
    ! ray_ended || LOST="Ray ended on $(node_ended)"
  fi
  clean_up
  if [[ -n "$REQUEUE" ]]; then
    requeue "the driver has checkpointed"
  elif [[ "$DRIVER_CODE" == 0 ]]; then
    log "finished"
    exit 0
  elif [[ -n "$LOST" ]]; then
    requeue "$LOST"
  elif [[ -n "$LEAVING" ]]; then
    requeue "the driver was ended after SIG$LEAVING"
  elif [[ "$MEGATRON_RETOOL_REQUEUE_ON_ERROR" == 1 ]]; then
    requeue "the driver failed with exit code $DRIVER_CODE"
  fi
  [[ -z "$DRIVER" ]] || log "not requeued: an error of the driver would come again (MEGATRON_RETOOL_REQUEUE_ON_ERROR=1 requeues)"
  exit "$DRIVER_CODE"
}
