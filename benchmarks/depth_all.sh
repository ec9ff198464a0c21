#!/bin/sh
# All about the depth operators that needs a GPU, in parts that run alone: sh benchmarks/depth_all.sh OUT PART …
# PART is NAME or NAME=SECONDS, its limit; without any, all of them in this order:
#   tests checks set slow overhead traffic memcheck train
# `set` compiles all systems of the depth set side by side and measures each while the others wait; `slow` are those
# whose autotuners take minutes, and our other plans. Each part writes its results and OUT/NAME.log when it ends or is
# stopped, prints the log's end, and never stops the next one; the exit status is 1 if one failed. `set` needs the
# packages of tools/peers.txt (and einops) on PYTHONPATH and vLLM's operator at $VLLM; `train` needs out/text from
# prepare_text.py. set and slow share OUT/depth.json, and go on from what it has. FLAGS are further options of the set's
# run, PYTHON the interpreter, TOKENS the budget of a training run, COMMIT the commit where it is not the repository's.
set -u
out=$1
shift
[ $# -gt 0 ] || set -- tests checks set slow overhead traffic memcheck train
export PYTHONPATH="${PYTHONPATH:-}:src" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
mkdir -p "$out"
python=${PYTHON:-python3}
FLAGS=${FLAGS:-}

tilewise_bench() { $python -c 'from tilewise.bench.cli import app; app()' "$@"; }
bench() { tilewise_bench run --set depth --json "$out/depth.json" --time-limit $within $FLAGS "$@"; }

# One process a variant, all side by side: the model is small and each waits for its own host. Full has more launches
# a step, so each of its seeds is a process of its own. The shared clock makes speeds of variants no comparison.
train() {
    for v in standard block2 block4 block8; do
        $python benchmarks/depth_train.py --data out/text --tokens "${TOKENS:-3145728}" --seconds "$1" \
            --variants $v --seeds 0 1 2 --out "$out/train_$v.json" &
    done
    for s in 0 1 2; do
        $python benchmarks/depth_train.py --data out/text --tokens "${TOKENS:-3145728}" --seconds "$1" \
            --variants full --seeds $s --out "$out/train_full_$s.json" &
    done
    wait
    $python benchmarks/depth_train.py --join "$out"/train_*.json --out "$out/depth_train.json"
}

# Runs part $1 within $2 seconds; measurements stop a little earlier by themselves.
part() {
    within=$(($2 - 8))
    case $1 in
    tests) $python benchmarks/depth_tests.py --out "$out" --until $within ;;
    checks) $python benchmarks/depth_kernels.py check --out "$out" ;;
    set)
        systems=tilewise,tilewise-serving,plain,plain-liger,fla-core,liger-kernel,compile
        bench --systems "$systems${VLLM:+,vllm}" --patience 25 ${VLLM:+--vllm-source "$VLLM"}
        ;;
    slow) bench --systems tilewise-one-pass,tilewise-overlap,eager,flash-attn-res,fast-attnres --patience 25 ;;
    overhead) $python benchmarks/depth_overhead.py --out "$out" --limit $within ;;
    traffic) $python benchmarks/depth_traffic.py --out "$out" --limit $within ;;
    memcheck)
        for i in 0 1 2 3 4 5 6 7 8; do
            # Every tensor an allocation of its own, so that a read past its end is seen.
            PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck $python benchmarks/depth_memcheck.py \
                --only $i >"$out/memcheck_$i.txt" 2>&1 &
        done
        wait
        grep -H "done\|ERROR SUMMARY\|Error:" "$out"/memcheck_*.txt
        $python benchmarks/depth_memcheck.py --collect "$out"
        ;;
    train) train $within ;;
    esac
}

limit_of() {
    case $1 in
    tests) echo 240 ;; checks) echo 120 ;; set) echo 170 ;; slow) echo 200 ;;
    overhead) echo 150 ;; traffic) echo 150 ;; memcheck) echo 180 ;; train) echo 250 ;;
    *) return 1 ;;
    esac
}

if [ "${DEPTH_PART:-}" ]; then
    part "$DEPTH_PART" "$1"
    exit
fi
failed=0
for each in "$@"; do
    name=${each%%=*}
    seconds=$(limit_of "$name") || {
        echo "part: found $name; expected tests, checks, set, slow, overhead, traffic, memcheck, train"
        exit 2
    }
    case $each in *=*) seconds=${each#*=} ;; esac
    began=$(date +%s)
    echo "== $name, at most $seconds s"
    DEPTH_PART=$name timeout -k 5 "$seconds" sh "$0" "$out" "$seconds" >"$out/$name.log" 2>&1
    status=$?
    tail -n 24 "$out/$name.log"
    [ $status -eq 0 ] || failed=1
    echo "== $name ended with status $status after $(($(date +%s) - began)) s"
done
[ -f "$out/depth.json" ] && tilewise_bench report "$out/depth.json" --no-plots
exit $failed
