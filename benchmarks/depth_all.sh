#!/bin/sh
# Every measurement of the depth operators on one GPU, most important first: sh benchmarks/depth_all.sh OUT [SECONDS]
# Needs the peers of tools/peers.txt and out/text from prepare_text.py. SECONDS is the share of the comparison with
# peers; training and checks take about 30 s more. Variants are trained side by side: their speeds do not compare.
set -u
out=$1 limit=${2:-84}
export PYTHONPATH="${PYTHONPATH:-}:src" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
mkdir -p "$out"
began=$(date +%s)
model="--d 256 --layers 8 --heads 4 --kv-heads 2 --hidden 704 --batch 32 --length 256"
recipe="--data out/text $model --held-out 256"
kinds="standard block2 block4 block8 full"

# Compile the training kernels while the comparison compiles its own.
(
    sleep 6
    for v in $kinds; do
        nice python3 benchmarks/depth_train.py $recipe --tokens 16384 --evaluations 1 --out "$out/warm_$v.json" \
            --variants $v --seeds 0 >"$out/warm_$v.log" 2>&1 &
    done
    wait
) &
timeout -k 1 "$limit" python3 benchmarks/depth_table.py --out "$out" --sweep --limit $((limit - 10)) \
    --systems tilewise plain "tilewise stream" "plain liger-kernel" liger-kernel fla-core flash-attn-res
echo "comparison done after $(($(date +%s) - began)) s"

nice timeout 26 python3 -m pytest -q -x -p no:cacheprovider tests/depth/test_streams_gpu.py >"$out/tests.log" 2>&1 &
nice timeout 26 python3 benchmarks/depth_kernels.py check --cases float32 --out "$out" >"$out/check.log" 2>&1 &
nice timeout 26 compute-sanitizer --tool memcheck python3 benchmarks/depth_memcheck.py >"$out/memcheck.log" 2>&1 &
for v in $kinds; do
    timeout 30 python3 benchmarks/depth_train.py $recipe --tokens 2097152 --seconds 24 --out "$out/train_$v.json" \
        --variants $v --seeds 0 1 2 >"$out/train_$v.log" 2>&1 &
done
wait
for f in tests check memcheck; do echo "== $f"; tail -n 6 "$out/$f.log"; done
python3 benchmarks/depth_train.py --join "$out"/train_*.json --out "$out/depth_train.json"
echo "all done after $(($(date +%s) - began)) s"
