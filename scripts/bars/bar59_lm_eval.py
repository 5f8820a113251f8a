"""lm-evaluation-harness on 40 questions of our own, by the HTTP API and by transformers, on the same weights in f32 (issue 59).

usage: bar59_lm_eval.py PROGRAM FOLDER       FOLDER: SmolLM2 as scripts/models/hf_folder.py writes it

Needs `pip install lm_eval[api,hf]` and a CPU build of torch. Prints the answers that differ.
"""
import json, os, re, subprocess, sys, tempfile, time

PROGRAM, FOLDER = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
CAPITALS = "France:Paris Italy:Rome Japan:Tokyo Spain:Madrid Egypt:Cairo Germany:Berlin Russia:Moscow Greece:Athens Cuba:Havana Peru:Lima"
PLURALS = "mouse:mice child:children foot:feet leaf:leaves box:boxes knife:knives man:men tooth:teeth goose:geese city:cities"
OPPOSITES = "hot:cold big:small up:down old:young fast:slow wet:dry light:dark hard:soft rich:poor early:late"
SUMS = "2+3:5 7+1:8 4+4:8 9+2:11 6+6:12 3+7:10 8+5:13 1+1:2 5+9:14 10+10:20"
FORMS = [(CAPITALS, "The capital of {} is"), (PLURALS, "The plural of {} is"), (OPPOSITES, "The opposite of {} is"), (SUMS, "Question: What is {}? Answer:")]
TASK = """task: own
dataset_path: json
dataset_kwargs: {data_files: {test: items.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def items():
    """40 questions with four choices each; wrong ones are the next answers of the same list."""
    for pairs, form in FORMS:
        pairs = [pair.split(":") for pair in pairs.split()]
        for i, (asked, right) in enumerate(pairs):
            wrong = [pairs[(i + k) % len(pairs)][1] for k in range(1, len(pairs))]
            wrong = list(dict.fromkeys(w for w in wrong if w != right))[:3]
            choices = wrong[:i % 4] + [right] + wrong[i % 4:]
            yield {"question": form.format(asked), "choices": choices, "answer": choices.index(right)}


def evaluate(name, model, arguments):
    """The choices and their log-likelihoods, by item."""
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments, "--tasks", "own",
               "--include_path", ".", "--output_path", name, "--log_samples", "--batch_size", "1", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    files = [os.path.join(at, f) for at, _, all in os.walk(name) for f in all if f.startswith("samples_own")]
    samples = sorted(map(json.loads, open(files[0])), key=lambda s: s["doc_id"])
    return [([float(r[0][0]) for r in s["resps"]], s["acc"]) for s in samples]


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    os.environ.update(PACELINE_HOME=f"{folder}/home", HF_DATASETS_CACHE=f"{folder}/cache", HF_HUB_OFFLINE="1", NO_PROXY="127.0.0.1")
    open("own.yaml", "w").write(TASK)
    open("items.jsonl", "w").writelines(json.dumps(item) + "\n" for item in items())
    log = open("log", "w")
    up = subprocess.Popen([PROGRAM, "up", FOLDER, "--class", "cpu-f32", "--port", "0", "--control-port", "0", "--discovery", "none"], stdout=log, stderr=log)
    while not (found := re.search(r"listening on (\S+)", open("log").read())) and up.poll() is None:
        time.sleep(0.1)
    name = os.path.basename(FOLDER)
    ours = evaluate("ours", "local-completions", f"model={name},base_url={found[1]}/v1/completions,tokenizer={FOLDER},num_concurrent=1")
    up.terminate()
    up.wait(30)
    theirs = evaluate("theirs", "hf", f"pretrained={FOLDER},dtype=float32")

right = [sum(int(acc) for _, acc in side) for side in (ours, theirs)]
best = lambda logs: logs.index(max(logs))
differ = [i for i, (a, b) in enumerate(zip(ours, theirs)) if best(a[0]) != best(b[0])]
far = {i: [round(x - y, 4) for x, y in zip(a[0], b[0])] for i, (a, b) in enumerate(zip(ours, theirs)) if any(abs(x - y) > 1e-3 for x, y in zip(a[0], b[0]))}
print(f"{len(ours)} items: {right[0]} right by the API, {right[1]} by transformers; other choices: {differ}; log-likelihoods that differ by more than 1e-3: {far}")
