#!/bin/sh
# What needs GPUs, in one go: the tests marked gpu and the tables of docs/, each with a time limit and a file of its own.
#
#   sh benchmarks/gpu.sh FOLDER [tests] [ranks] [draft] [end-to-end] [replicas] [arriving] [one-gpu]
#                               [round-trips] [coordinators] [long-prompts] [both] [vllm] [four-gpus]
#                               [pool] [rounds]
#                               [chat-model] [chat-head] [chat-block] [chat-two] [chat-vllm]
#
# Without names those of the first line, about twenty-five minutes on two GPUs; with one GPU leave out ranks,
# end-to-end, replicas and arriving. Only by name: round-trips, longer links (three minutes); coordinators, one and two
# before the same workers (four); long-prompts, of 8,192 and 32,768 tokens (four); both, a resident head beside a draft
# worker, and one with one guess a round whose target has both GPUs (four); vllm, the same loads on vLLM, an engine on
# each GPU (six on two; VLLM names its interpreter); four-gpus, and there a target on two of them (nine); pool, the
# candidate pool's tests, sanitizers and figures (four); rounds, a target's rounds in process, with resident drafters
# too (nine).
# Conversations, by what recipes/smollm2/all.sh has written to the folder $SMOLLM2, four minutes each: chat-model,
# chat-head and chat-block, drafters on the target's GPU; chat-two, the draft model on a second one; chat-vllm, four
# runs of vLLM, one on each GPU that there is. The first of them writes the target, which takes two minutes more.
# FOLDER gets the reports. A GPU that measures should do nothing else; CUDA_VISIBLE_DEVICES picks it. PYTHON names
# another interpreter, CHECKPOINTS where widened checkpoints are kept (20 GB, as much again for conversations; default
# FOLDER/checkpoints).
set -u
[ $# -ge 1 ] || { sed -n '2,21s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 1
shift
[ $# -gt 0 ] || set -- tests ranks draft end-to-end replicas arriving one-gpu
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python}
checkpoints=${CHECKPOINTS:-$out/checkpoints}
awake="--keep-cores-awake 3"
# Long enough for an answer in each of nine categories by one session.
conversations="--prompts coordinator/bench/prompts.jsonl --max-new-tokens 256 --sessions 1 16 64 --temperatures 0 1 --warm-up 1.0 --measure 10"
failed=0

# part SECONDS NAME COMMAND...: its output goes to FOLDER/NAME.txt
part() {
    limit=$1 name=$2
    shift 2
    begin=$(date +%s)
    timeout "$limit" "$@" > "$out/$name.txt" 2>&1
    code=$?
    echo "$name: exit code $code after $(($(date +%s) - begin)) s, $out/$name.txt"
    [ $code -eq 0 ] || failed=1
}

# pytest-benchmark, where it is installed, warns that it is off under xdist, and warnings are errors here.
gpu_tests() {
    name=$1
    shift
    part 400 "$name" "$python" -m pytest -q -m gpu -p no:benchmark -p no:cacheprovider --durations=10 "$@"
}

# widened ROLE SHAPE [LENGTH]: the embedded model in that shape, and for texts that long, written once
widened() {
    mkdir -p "$checkpoints"
    folder=$1-$2${3:+-$3}
    [ -f "$checkpoints/$folder/config.json" ] || part 120 "widen-$folder" env CUDA_VISIBLE_DEVICES= \
        "$python" -m outrider.cli widen "$1" "$2" "$checkpoints/$folder" --check none ${3:+--max-position-embeddings "$3"}
}

# large ROLE SHAPE FOLDER [OPTION...]: SmolLM2's model of that folder in that shape, written once
large() {
    mkdir -p "$checkpoints"
    role=$1 shape=$2 source=$SMOLLM2/$3
    shift 3
    [ -f "$checkpoints/smollm2-$role-$shape/config.json" ] || part 200 "widen-smollm2-$role-$shape" env CUDA_VISIBLE_DEVICES= \
        "$python" -m outrider.cli widen "$role" "$shape" "$checkpoints/smollm2-$role-$shape" --check none --source "$source" "$@"
}

# chat NAME SETUP DRAFTER OPTION...: SmolLM2 at the cost of 8 billion parameters, on conversations
chat() {
    large target 8b target
    report=chat_$1 setup=$2 drafter=$3
    shift 3
    # shellcheck disable=SC2086  # options apart
    part 360 "$report" "$python" benchmarks/end_to_end.py --device cuda --setups "$setup" \
        --target "$checkpoints/smollm2-target-8b" --draft "$checkpoints/smollm2-$drafter" $conversations \
        --prepare 1.0 --kv-bytes 24000000000 --time-limit 330 --draft-args="--kv-bytes 8000000000 $awake" \
        --target-args="$awake" --coordinator-args="$awake" --output "$out/$report" "$@"
}

# chat_vllm DRAFT_TOKENS: what chat measures, by vLLM
chat_vllm() {
    # shellcheck disable=SC2046,SC2086  # options apart
    part 330 "chat_vllm_$1" "${VLLM:-$python}" benchmarks/against_vllm.py --target "$checkpoints/smollm2-target-8b" \
        $(drafting "$checkpoints/smollm2-draft-160m" "$1") $conversations --output-json "$out/chat_vllm_$1.json"
}

# drafting FOLDER DRAFT_TOKENS: options of that draft; none without draft tokens, for plain decoding
drafting() {
    [ "$2" -eq 0 ] || echo "--draft $1 --draft-tokens $2"
}

# each_k COMMAND: with 0, 2, 4 and 8 draft tokens, as many at a time as there are GPUs
each_k() {
    cards=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -s -d , -)}
    gpus=$(echo "$cards" | tr , ' ' | wc -w) engines=
    for draft_tokens in 0 2 4 8; do
        card=$(echo "$cards" | cut -d , -f $(($(echo "$engines" | wc -w) + 1)))
        (failed=0; export CUDA_VISIBLE_DEVICES="$card"; "$1" "$draft_tokens"; exit $failed) & engines="$engines $!"
        if [ "$(echo "$engines" | wc -w)" -eq "$gpus" ] || [ "$draft_tokens" -eq 8 ]; then
            for engine in $engines; do
                wait "$engine" || failed=1
            done
            engines=
        fi
    done
}

# end_to_end NAME SECONDS OPTION...: the widened pair through the whole service, each role on three cores that never sleep
end_to_end() {
    widened target 8b
    widened draft 160m
    report=$1 seconds=$2
    shift 2
    part $((seconds + 90)) "$report" "$python" benchmarks/end_to_end.py --device cuda \
        --target "$checkpoints/target-8b" --draft "$checkpoints/draft-160m" --prompt-tokens 1024 --max-new-tokens 768 --warm-up 0.9 --prepare 1.0 --measure 2 \
        --scale-to 3.5 --kv-bytes 32000000000 --time-limit "$seconds" --draft-args="--kv-bytes 12000000000 $awake" \
        --target-args="$awake" --coordinator-args="$awake" --output "$out/$report" "$@"
}

# resident NAME OPTION...: the widened target on one GPU with a drafter in it, the most sessions first
resident() {
    report=$1
    shift
    end_to_end "resident_$report" 150 --gpus 1 --setups resident --sessions 256 64 1 16 --temperatures 0 1 --warm-up 0.8 \
        --kv-bytes 36000000000 "$@"
}

# vllm DRAFT_TOKENS: what end_to_end measures, by vLLM; 32 and 48 sessions are a replica's part of more
vllm() {
    # shellcheck disable=SC2046  # options apart
    part 200 "vllm_$1" "${VLLM:-$python}" benchmarks/against_vllm.py --target "$checkpoints/target-8b" \
        $(drafting "$checkpoints/draft-160m" "$1") --sessions 16 64 32 48 1 8 --temperatures 0 1 --prompt-tokens 1024 \
        --max-new-tokens 768 --warm-up 1.2 --measure 2 --output-json "$out/vllm_$1.json"
}

# rounds NAME SECONDS OPTION...: a target's rounds in process, with prompts of 1,024 tokens
rounds() {
    report=$1 seconds=$2
    shift 2
    part "$seconds" "$report" "$python" benchmarks/rounds --device cuda --target "$checkpoints/target-8b-8192" \
        --prompt-tokens 1024 --max-new-tokens 320 --keep-cores-awake 3 --output "$out/$report.json" "$@"
}

# side_by_side COMMAND...: with the kernels of both models on the first GPU at once
side_by_side() {
    export CUDA_MPS_PIPE_DIRECTORY="$out/mps" CUDA_MPS_LOG_DIRECTORY="$out/mps-log"
    mkdir -p "$out/mps" "$out/mps-log"
    nvidia-cuda-mps-control -d
    "$@"
    echo quit | nvidia-cuda-mps-control
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

for name in "$@"; do
    case $name in
        tests) gpu_tests tests -n "${WORKERS:-$(($(nproc) * 3 / 4))}" tests/kernels tests/outrider tests/target_worker tests/draft_worker tests/benchmarks \
            --deselect tests/outrider/engine/test_tensor_parallel.py --deselect tests/outrider/engine/test_weight_reload.py ;;
        # Side by side: their models are small, and each captures graphs for the better part of a minute.
        ranks) gpu_tests ranks -n 5 --dist load tests/outrider/engine/test_tensor_parallel.py tests/outrider/engine/test_weight_reload.py \
            tests/target_worker/rounds/test_tensor_parallel.py
            part 240 tensor_parallel "$python" benchmarks/tensor_parallel.py 8b@1 8b@2 70b@2 ;;
        draft) for shape in 160m 1b; do
                part 180 "draft_service_$shape" "$python" benchmarks/draft_service.py --device cuda --shape "$shape" \
                    --keep-cores-awake 4 --json "$out/draft_service_$shape.json"
            done ;;
        # A machine's cores are shared by what is started.
        end-to-end) end_to_end end_to_end 320 --setups 1+1 --modes off async --sessions 1 4 16 64 128 256 --temperatures 0 1 \
            --synthetic 0 --kv-bytes 40000000000 --draft-args="--kv-bytes 14000000000 $awake" ;;
        round-trips) end_to_end round_trips 180 --setups 1+1 --modes async --sessions 1 16 --temperatures 0 1 --round-trips 1 3 ;;
        coordinators) end_to_end coordinators 180 --coordinators 1 2 --setups 1+1 --modes async --sessions 128 256 \
            --temperatures 0 1 --kv-bytes 40000000000 --draft-args="--kv-bytes 14000000000 $awake" ;;
        # Four sessions come first: their prompts are prefilled before they are measured, and the single one repeats them.
        # The embedded models know no such lengths: what they draft is wrong, and the service learns that from coupled cells.
        long-prompts) widened target 8b 33792
            widened draft 160m 33792
            for tokens in 8192 32768; do
                end_to_end "long_prompts_$tokens" 150 --setups 1+1 --modes off async --sessions 4 1 --temperatures 0 \
                    --target "$checkpoints/target-8b-33792" --draft "$checkpoints/draft-160m-33792" --synthetic 0.8 --only-synthetic \
                    --prompt-tokens "$tokens" --prompt-count 4 --max-new-tokens 512 \
                    --kv-bytes 40000000000 \
                    --draft-args="--kv-bytes 14000000000 $awake --min-path-value 0.0001 --min-acceptance 0.0001"
            done ;;
        replicas) end_to_end replicas 150 --setups 1+1 0+2 --modes off --sessions 16 64 --temperatures 0 --baselines-at 0 ;;
        arriving) widened target 8b 8192
            widened draft 160m 8192
            end_to_end arriving 100 --setups 1+1 --modes off async --sessions 32 --temperatures 0 --max-new-tokens 3000 \
                --target "$checkpoints/target-8b-8192" --draft "$checkpoints/draft-160m-8192" --arriving 128 4096 ;;
        # One draft for one, two or three targets, two for two, none, and a drafter inside each of four: tokens/s per GPU
        # says how many targets a draft can feed. 23 processes share the cores: each keeps fewer awake.
        four-gpus) always=$awake awake="--keep-cores-awake 2"
            end_to_end four_gpus 360 --gpus 4 --setups 1+1 1+2 1+3 2+2 0+4 4xresident --coordinators 1 2 \
                --modes off async --sessions 64 128 192 --temperatures 0 1 --warm-up 0.8 --measure 1.6 \
                --kv-bytes 40000000000 --draft-args="--kv-bytes 14000000000 $awake"
            end_to_end four_gpus_tp2 150 --gpus 4 --target-gpus 2 --setups 2+1 --modes async --sessions 64 128 192 \
                --temperatures 0 1 --warm-up 0.8 --measure 1.6 --kv-bytes 40000000000 \
                --draft-args="--kv-bytes 14000000000 $awake"
            awake=$always ;;
        # Sanitizers see one short history of every kernel.
        pool) gpu_tests pool_tests tests/kernels/pool tests/outrider/engine/test_round_rings.py
            for tool in memcheck racecheck; do
                part 150 "pool_$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 --target-processes all \
                    "$python" -m pytest -q -m gpu -p no:benchmark -p no:cacheprovider -k "short or rings" tests/kernels/pool
            done
            part 120 pool_kernels "$python" benchmarks/kernels.py --only pool --output-json "$out/pool.json" ;;
        rounds) widened target 8b 8192
            rounds rounds 300 --modes off replay --sessions 1 16 64 256
            rounds rounds_timeline 90 --modes replay --sessions 1 --max-new-tokens 768 --rounds 100 --chance 0.9 \
                --timeline "$out/rounds_timeline.png"
            widened draft 160m 8192
            widened eagle 8b
            for draft in draft-160m-8192 eagle-8b; do
                rounds "rounds_resident_$draft" 90 --modes resident --sessions 1 16 64 --draft "$checkpoints/$draft"
            done ;;
        one-gpu) resident model --draft "$checkpoints/draft-160m" --modes off async --temperatures 0 1 0.6 --synthetic 0
            widened eagle 8b
            resident head --draft "$checkpoints/eagle-8b" --modes async
            resident head_one_guess --draft "$checkpoints/eagle-8b" --modes async \
                --target-args="$awake --draft-branching 1 --max-draft-steps 1"
            widened block 8b
            resident block --draft "$checkpoints/block-8b" --modes async
            side_by_side end_to_end shared 120 --gpus 1 --setups shared --modes async --sessions 1 16 64 --temperatures 0 1 ;;
        both) widened eagle 8b
            end_to_end both 120 --setups 1+1 --modes async --sessions 1 16 64 --temperatures 1 \
                --target-args="$awake --draft-model $checkpoints/eagle-8b"
            end_to_end head_one_guess_tp2 120 --gpus 2 --target-gpus 2 --setups resident --draft "$checkpoints/eagle-8b" \
                --modes off async --sessions 1 16 64 256 --temperatures 0 \
                --target-args="$awake --draft-branching 1 --max-draft-steps 1" ;;
        vllm) widened target 8b
            widened draft 160m
            each_k vllm ;;
        chat-model) large draft 160m draft
            chat model resident draft-160m --gpus 1 --modes off async ;;
        chat-head) large eagle 8b eagle/head --of-target "$SMOLLM2/target"
            chat head resident eagle-8b --gpus 1 --modes async ;;
        chat-block) large block 8b block/head --of-target "$SMOLLM2/target"
            chat block resident block-8b --gpus 1 --modes async ;;
        chat-two) large draft 160m draft
            chat two 1+1 draft-160m --gpus 2 --modes async ;;
        chat-vllm) large target 8b target
            large draft 160m draft
            each_k chat_vllm ;;
        *) echo "unknown part: $name; run without arguments for the list" >&2; exit 2 ;;
    esac
done
exit $failed
