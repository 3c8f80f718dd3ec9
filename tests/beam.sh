#!/usr/bin/env bash
# Prepares rows with Apache Beam in two processes and compares every byte with the rows of the local driver.
#
#   tests/beam.sh WORK
#
# WORK is an empty folder of 500 MB. BEAM is the Python of an environment with requirements-beam.txt, PYTHON that of one with requirements.txt
# (default .venv/bin/python). In a second folder, one worker is killed. In a third, the pipeline is killed KILLS times (default 3) before it may end.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 1 ] && [ -n "${BEAM:-}" ] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }
work=$1 python=${PYTHON:-.venv/bin/python} kills=${KILLS:-3}
mkdir -p "$work/text"

"$python" - "$work" <<'TEXT'
import gzip, json, pathlib, sys
from pydoc_data import topics
import pyarrow, pyarrow.parquet
from maelm_jax import config
from maelm_jax.data import vocabulary_training

work = pathlib.Path(sys.argv[1])
texts = [" ".join(topic.split()) for topic in topics.topics.values()]
vocabulary_training.train(texts, config.Vocabulary(size=2000)).save(work / "vocabulary")
for number in range(6):
    part = [text.replace("a", f"a{number}{repeat}a") for repeat in range(12) for text in texts]
    path = work / "text" / f"{number:02d}"
    if number % 3 == 0:
        path.with_suffix(".txt.gz").write_bytes(gzip.compress("\n\n".join(part).encode(), mtime=0))
    elif number % 3 == 1:
        path.with_suffix(".jsonl").write_text("\n".join(json.dumps({"text": text}) for text in part))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": part}), path.with_suffix(".parquet"))
TEXT

flags=(--gin_file=tiny.gin "--gin.TEXT_FILES=$work/text/*" "--gin.Vocabulary.file=$work/vocabulary" --gin.Corpus.heldout_fraction=0.1)
beam=("$BEAM" -m maelm_jax.prepare "${flags[@]}" --runner=beam --beam_runner=DirectRunner
  --beam_direct_running_mode=multi_processing --beam_direct_num_workers=2)

"$python" -m maelm_jax.prepare "${flags[@]}" "--gin.Corpus.rows_dir=$work/local"
"${beam[@]}" "--gin.Corpus.rows_dir=$work/beam"
diff -r "$work/local" "$work/beam"
echo "== Beam makes the same store"

mkdir "$work/wrong"
printf 'caf\xe9' >"$work/wrong/a.txt"
if "${beam[@]}" "--gin.TEXT_FILES=$work/wrong/*" "--gin.Corpus.rows_dir=$work/none" 2>"$work/wrong.log"; then exit 1; fi
grep "^error: $work/wrong/a.txt: not UTF-8 at byte 3" "$work/wrong.log"

setsid "${beam[@]}" "--gin.Corpus.rows_dir=$work/worker" >"$work/worker.log" 2>&1 &
until [ "$(find "$work/worker" -name '*.zip' 2>/dev/null | wc -l)" -ge 1 ]; do sleep 0.05; done
pkill -KILL --newest --session "$!" -f sdk_worker_main
if wait "$!"; then exit 1; fi
grep '^error: a worker process of Beam was killed' "$work/worker.log"
"${beam[@]}" "--gin.Corpus.rows_dir=$work/worker"
diff -r "$work/local" "$work/worker"
echo "== Beam with one worker killed ends, and makes the same store when started again"

for kill in $(seq "$kills"); do
  setsid "${beam[@]}" "--gin.Corpus.rows_dir=$work/killed" >"$work/killed.log" 2>&1 &
  # The text has four parts. When all are made, the command joins them and ends.
  until [ "$(find "$work/killed" -name '*.zip' 2>/dev/null | wc -l)" -ge "$kill" ]; do sleep 0.05; done
  kill -KILL -- "-$!"
  wait "$!" 2>/dev/null || true
  echo "== killed with $(find "$work/killed" -name '*.zip' | wc -l) parts"
done
"${beam[@]}" "--gin.Corpus.rows_dir=$work/killed"
diff -r "$work/local" "$work/killed"
echo "== Beam, killed $kills times, makes the same store"
