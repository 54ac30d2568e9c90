python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
export PYTHONPATH=/tmp/site:$PWD OMP_NUM_THREADS=4
S=$PWD/tests/workload/scripts; mkdir -p /tmp/w; cd /tmp/w
tune() { n=$1; shift; (timeout 110 python3 -m amptune tune $S/$n.py --budget ${B:-70s} -o $n.yaml "$@"; echo "rc $?") > $OUT/$n.txt 2>&1; cp .amptune/*$n*/workers.log $OUT/$n.log 2>/dev/null; tail -c 300000 $OUT/$n.log > $OUT/l 2>/dev/null; rm -f $OUT/$n.log $OUT/l; cp $n.yaml $OUT/ 2>/dev/null; }
t() { /usr/bin/time -f "%e s: $*" "$@" > /dev/null 2>> $OUT/runs.txt; }
GPT="--width 512 --layers 8 --context 256 --batch-size 16 --words 5000"
tune gpt -- $GPT
t python3 $S/gpt.py $GPT --steps 20; t python3 $S/gpt.py $GPT --steps 320
t python3 -m amptune run gpt.yaml $S/gpt.py -- $GPT --steps 20; t python3 -m amptune run gpt.yaml $S/gpt.py -- $GPT --steps 320
tune trainer -- --width 768 --layers 12 --length 256 --batch-size 8
tune classifier -- --resnet --size 64 --batch-size 128 --samples 12800 --workers 4
tune actor_critic
B=60s tune word_lstm -- --width 650 --words 20000 --batch-size 20 --time 35
ls -la /tmp/w > $OUT/left.txt
cd $OUT; tar czf all.tgz *.txt *.yaml; rm -f *.yaml; tail -n 25 *.txt
