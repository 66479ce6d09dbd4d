#!/usr/bin/env bash
# Two clusters on one machine: a training cluster, and a serving cluster that lends its device over a thin link.
#
#     sudo examples/two_clusters.sh [STEPS]          # or: make example-two-clusters; docs/deploy.md, "Two clusters"
#
# Each cluster is a network namespace. The training cluster has the gateway, the relay of the weights, a rollout worker
# (`near`) and the trainer; both servers speak TLS. The serving cluster has a device (`far`) that serves generated users
# and lends what they leave. It listens on its loopback only, and dials out to the gateway and the relay. At the end the
# example prints what was played where, what the link carried, which connections there were, and what users got.
set -euo pipefail

steps=${1:-4}
python=${ROSE_PYTHON:-python3} # has ROSE
link_rate=${ROSE_LINK_RATE:-50mbit}
link_delay=${ROSE_LINK_DELAY:-10ms} # each way
wait_s=${ROSE_WAIT_S:-300} # longest start of a process
here=$(cd "$(dirname "$0")" && pwd)
training=rose-training-$$ serving=rose-serving-$$ card=rose0
near=10.213.11.1 far=10.213.11.2 gateway_port=8002 relay_port=7070
gateway=https://$near:$gateway_port relay=https://$near:$relay_port

cannot() { # 77: it cannot run on this machine, and nothing was started
    echo "$1: this example makes two network namespaces, which needs root: sudo $0" >&2
    exit 77
}
for program in ip tc ss openssl; do
    command -v "$program" >/dev/null || cannot "$program is not installed (apt-get install iproute2 openssl)"
done
[[ $(id -u) == 0 ]] || cannot "not permitted without root"
unset ROSE_RELAY_SECRET_FILE
folder=$(mktemp -d)
pids=()

# shellcheck disable=SC2317,SC2329 # called by the trap
finish() { # ends every process that was started, and removes the namespaces
    trap - EXIT
    trap '' INT TERM
    for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
    for ((tenth = 0; tenth < 200; tenth++)); do
        [[ -z $(ip netns pids "$training" 2>/dev/null; ip netns pids "$serving" 2>/dev/null) ]] && break
        sleep 0.1
    done
    for side in "$training" "$serving"; do # what did not end in 20 s
        for pid in $(ip netns pids "$side" 2>/dev/null); do kill -KILL "$pid" 2>/dev/null || true; done
        ip netns del "$side" 2>/dev/null || true
    done
    wait || true
    rm -rf "$folder"
}
trap finish EXIT
trap 'echo "stopped; everything that was started ends"; exit 130' INT
trap 'exit 143' TERM

make_clusters() { # two namespaces, and a pair of virtual cards between them
    ip netns add "$training" || cannot "no network namespaces here"
    ip netns add "$serving"
    ip link add "$card" netns "$training" type veth peer name "$card" netns "$serving"
    for end in "$training $near" "$serving $far"; do
        read -r side address <<<"$end"
        ip -n "$side" link set lo up
        ip -n "$side" address add "$address/24" dev "$card"
        ip -n "$side" link set "$card" up
        ip netns exec "$side" tc qdisc add dev "$card" root handle 1: tbf rate "$link_rate" burst 64k latency 200ms
        ip netns exec "$side" tc qdisc add dev "$card" parent 1:1 netem delay "$link_delay" 2>/dev/null ||
            link_delay="no delay (this kernel has no netem)"
    done
    echo "the link: $link_rate, $link_delay"
}

start() { # start NAME SIDE COMMAND...: its output goes to NAME.log
    local name=$1 side=$2
    shift 2
    ip netns exec "$side" "$@" >"$folder/$name.log" 2>&1 &
    pids+=($!)
}

started() { # started NAME TEXT: waits until its log has the text
    for ((tenth = 0; tenth < wait_s * 10; tenth++)); do
        grep -qs "$2" "$folder/$1.log" && return
        kill -0 "${pids[-1]}" 2>/dev/null || break
        sleep 0.1
    done
    echo "$1 did not start:" >&2
    cat "$folder/$1.log" >&2
    exit 1
}

carried() { ip netns exec "$serving" cat "/sys/class/net/$card/statistics/${1}_bytes"; }

look() { # the sockets of the serving cluster that are not of its loopback: state, own address, other address
    ip netns exec "$serving" ss -Htan | awk '$4 !~ /^(127\.|\[::1\])/ { print $1, $4, $5 }' >>"$folder/sockets"
}

report_connections() { # fails if there were others than those that the device has opened
    local to=" $far:[0-9]+ $near" seen others
    seen=$(sort -u -k2 "$folder/sockets")
    others=$(grep -vE "$to:($gateway_port|$relay_port)$" <<<"$seen" || true)
    echo "connections of the serving cluster: $(grep -cE "$to:$gateway_port$" <<<"$seen") to the gateway," \
        "$(grep -cE "$to:$relay_port$" <<<"$seen") to the relay, $(grep -c . <<<"$others") others"
    [[ -z $others ]] || { echo "$others" >&2; return 1; }
}

make_clusters
model=$("$python" -c 'from rose.train.warmstart import warm_start; print(warm_start())')
"$python" -m rose model new --preset qwen3-3m --out "$folder/users-model" >/dev/null
read -r first last < <("$python" -c 'import os; cores = sorted(os.sched_getaffinity(0)); print(cores[0], cores[-1])')

# A certificate for gateway and relay, which all others trust, and a token for each role. Each process is given only its own.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=rose \
    -addext "subjectAltName=IP:$near" -keyout "$folder/key.pem" -out "$folder/certificate.pem" 2>"$folder/openssl.log" ||
    { cat "$folder/openssl.log" >&2; exit 1; }
worker_token=$(openssl rand -hex 32) trainer_token=$(openssl rand -hex 32) secret=$(openssl rand -hex 32)
read_key=$(ROSE_RELAY_SECRET=$secret "$python" -m rose relay key)

ROSE_WORKER_TOKEN=$worker_token ROSE_TRAINER_TOKEN=$trainer_token \
    start gateway "$training" "$python" -m rose gateway "$model" --host "$near" --port "$gateway_port" \
    --ledger "$folder/ledger.sqlite" --set ssl_certfile="$folder/certificate.pem" --set ssl_keyfile="$folder/key.pem"
started gateway "is ready at"
ROSE_RELAY_SECRET=$secret start relay "$training" "$python" -m rose relay up --folder "$folder/values" \
    --listen "$near:$relay_port" --certificate "$folder/certificate.pem" --key "$folder/key.pem"
started relay "^relay of"

join=(--gateway "$gateway" --kv-memory-mb 64)
export SSL_CERT_FILE=$folder/certificate.pem
ROSE_WORKER_TOKEN=$worker_token ROSE_RELAY_SECRET=$read_key \
    start near "$training" "$python" -m rose serve --lend "$model" --rollout-port 8001 --device "cpu:$last" \
    --worker-name near "${join[@]}"
started near "is ready at"
ROSE_WORKER_TOKEN=$worker_token ROSE_RELAY_SECRET=$read_key \
    start far "$serving" "$python" -m rose serve "$folder/users-model" --lend "$model" --port 8000 --rollout-port 8001 \
    --device "cpu:$first" --worker-name far "${join[@]}"
started far "is ready at"
start users "$serving" "$python" -m rose load gamma:rate=1,cv=2 --duration 3600 --url http://127.0.0.1:8000
users=${pids[-1]}

for port in 8000 8001; do # of the device
    if ip netns exec "$training" timeout 5 bash -c "exec 3<>/dev/tcp/$far/$port" 2>/dev/null; then
        echo "the training cluster can connect to port $port of the device" >&2
        exit 1
    fi
done
ROSE_TRAINER_TOKEN=$trainer_token ROSE_RELAY_SECRET=$secret ip netns exec "$training" \
    "$python" "$here/two_clusters.py" "$model" "$gateway" "$relay" "$steps" 2 &
trainer=$!
pids+=("$trainer")
while kill -0 "$trainer" 2>/dev/null; do
    look
    sleep 0.2
done
wait "$trainer" || { sleep 1; cat "$folder"/*.log >&2; exit 1; } # after Ctrl-C the gateway may end before the trainer, and this shell is told last

echo "the link carried: $(carried rx) bytes to the serving cluster, $(carried tx) from it"
kill -TERM "$users" && wait "$users" || true # it prints what users got
echo "users (500 ms to the first token, 150 ms per token): $(sed -n 's/^ *attained *//p' "$folder/users.log")"
report_connections
