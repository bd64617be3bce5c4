"""Times the shapes of bench/bench.c in Rapt and in other libraries, interleaved in one run.

    make bench-peers [ARGS="--threads 1 --filter P1 --seconds 5 --peers pytorch,openvino --json FILE"]

Each library runs in a process of its own and is stopped while another has its turn, so that no thread that waits or
spins costs the others anything. One round of each follows another; the best round of each counts, of its best variant.
A second table has what Python users get: rapt.torch beside the calls of PyTorch's that it replaces, in one process.
"""

import argparse
import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PAIR = "rapt_torch"  # rapt.torch and PyTorch in one process: a table of its own
PEERS = ["pytorch", "onnxruntime", "openvino", "onednn", "jax", "openblas", PAIR]
TITLES = {"rapt": "Rapt", "pytorch": "PyTorch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO",
          "onednn": "oneDNN", "jax": "JAX", "openblas": "OpenBLAS*", PAIR: "rapt.torch"}
PRODUCTS_ONLY = {"openblas"}  # leaves out the softmax, so it is shown but is no peer
PATIENCE = 300  # seconds for an answer
PAUSE = 2e-3  # seconds between turns
LEAST_ROUNDS = 8
LAYERS, FEED_FORWARD = 6, 2048  # of the encoder

# What --isa avx2 can do for the peers. ONNX Runtime always takes what the CPU has, as do kernels of OpenVINO's own.
ONLY_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2",
             "DNNL_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Haswell", "XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}


class Failure(Exception):
    pass


class Participant:
    """A process that answers lines, and sleeps while it is not asked."""

    def __init__(self, name: str, command: list, environment: dict):
        self.name, self.command, self.environment = name, command, environment
        self.process, self.about = None, {}

    def start(self) -> None:
        self.log = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(
            self.command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
            text=True, start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))  # PR_SET_PDEATHSIG: never left behind
        self.about = self.ask("about")

    def ask(self, line: str):
        if self.process is None:
            self.start()
        try:
            os.killpg(self.process.pid, signal.SIGCONT)
            print(line, file=self.process.stdin, flush=True)
            if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
                self.end()
                raise Failure(f"no answer in {PATIENCE} s")
            answer = self.process.stdout.readline()
            os.killpg(self.process.pid, signal.SIGSTOP)
            return json.loads(answer)
        except (OSError, ValueError):
            raise Failure(self.end()) from None

    def end(self) -> str:
        """Ends the process and returns its last words."""
        if self.process is None:
            return ""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except OSError:
            pass  # it is gone
        self.process.communicate()
        status, self.process = self.process.returncode, None
        self.log.seek(0)
        return (self.log.read().strip().splitlines() or [f"ended with {status}"])[-1][:200]


class Times:
    """The rounds of one variant."""

    def __init__(self, name: str):
        self.name, self.best, self.worst = name, float("inf"), 0.0

    def add(self, seconds: float) -> None:
        self.best, self.worst = min(self.best, seconds), max(self.worst, seconds)


def time_shape(shape: dict, participants: list[Participant], seconds: float, notes: list[str]) -> dict:
    """Seconds, spread, share of the limit and variant of each participant."""
    times: dict[Participant, list[Times]] = {}

    def give_up(participant: Participant, why: str) -> None:
        if participant.name == "rapt":
            sys.exit(f"rapt_bench, {shape['name']}: {why}")
        times.pop(participant, None)
        notes.append(f"{TITLES[participant.name]}, {shape['name']}: {why}")

    for participant in participants:
        try:
            if participant.name == "rapt":
                participant.ask(f"prepare {shape.get('limit_of', shape['name'])}")
                times[participant] = [Times("")]
                continue
            prepared = participant.ask("prepare " + json.dumps(shape))
            times[participant] = [Times(variant) for variant in prepared["seconds"]]
            for variant, why in prepared["refused"].items():
                notes.append(f"{TITLES[participant.name]}, {shape['name']}, {variant}: {why}")
        except Failure as failure:
            give_up(participant, str(failure))

    limit, short_limit, rounds, begin = 0.0, 0.0, 0, time.monotonic()
    while rounds < LEAST_ROUNDS or time.monotonic() - begin < seconds:
        for participant, variants in list(times.items()):
            for variant in variants:
                time.sleep(PAUSE)
                try:
                    answer = participant.ask(f"round {variant.name}".strip())
                except Failure as failure:
                    give_up(participant, str(failure))
                    break
                if participant.name == "rapt":
                    answer, limit_now, short_now = answer
                    limit, short_limit = max(limit, limit_now), max(short_limit, short_now)
                variant.add(answer)
        rounds += 1

    result = {"name": shape["name"], "words": shape["words"], "limit": limit, "short_limit": short_limit,
              "rounds": rounds, "times": {}}
    for participant, variants in times.items():
        if participant.name == "rapt" and "limit_of" in shape:
            continue  # it timed another shape, for the limit alone
        sides = {"rapt.torch": PAIR, "PyTorch": "pytorch"} if participant.name == PAIR else {"": participant.name}
        for side, name in sides.items():
            timed = [variant for variant in variants if variant.name.startswith(side)]
            if timed:
                best = min(timed, key=lambda variant: variant.best)
                result["times"][name] = {"seconds": best.best, "spread": best.worst / best.best,
                                         "share": shape["work"] / best.best / limit,
                                         "share_of_short_limit": shape["work"] / best.best / short_limit,
                                         "variant": best.name}
    own = PAIR if any(participant.name == PAIR for participant in participants) else "rapt"
    peers = {name: t["seconds"] for name, t in result["times"].items() if name not in {"rapt", own, *PRODUCTS_ONLY}}
    if peers and own in result["times"]:
        result["best_peer"] = min(peers, key=peers.get)
        result["ratio"] = peers[result["best_peer"]] / result["times"][own]["seconds"]
    return result


def encoders(layer: dict) -> list[dict]:
    """A TransformerEncoder with the sizes of a layer's shape, and the same trained."""
    n, l, e = layer["n"], layer["l"], layer["embed_dim"]
    products, attention = n * l * e * (8 * e + 4 * FEED_FORWARD), 4 * n * l * l * e
    words = f"TransformerEncoder of {LAYERS}, E{e} H{layer['heads']} FF{FEED_FORWARD} N{n} L{l}"
    more = {"layers": LAYERS, "feed_forward": FEED_FORWARD, "limit_of": layer["name"]}
    return [{**layer, **more, "name": "T6", "words": words, "work": LAYERS * (products + attention)},
            {**layer, **more, "name": "T6t", "words": f"trained: {words}", "trains": True,
             "work": LAYERS * (3 * products + 3.5 * attention)}]


def in_words(seconds: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1, "s"), (1e3, "ms")) if seconds * s >= 1), (1e6, "us"))
    return f"{seconds * scale:.3g} {unit}" if seconds * scale < 1000 else f"{seconds * scale:.0f} {unit}"


def row(result: dict, names: list[str]) -> str:
    cells = [f"{result['name']:4}"]
    for name in names:
        t = result["times"].get(name)
        words = f"{in_words(t['seconds'])} {100 * t['share']:3.0f} % {t['spread']:4.1f}x" if t else "-"
        cells.append(f"{words:>20}")
    best = f"{result['ratio']:.2f} {TITLES[result['best_peer']]}" if "ratio" in result else "-"
    return " | ".join([*cells, best])


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def measure(options, threads: int, report: dict, notes: list[str]) -> None:
    """All shapes on so many threads; one table."""
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", TORCHINDUCTOR_COMPILE_THREADS="1",
                       RAPT_BUILD=str(options.bench.parent))
    environment.update({f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS")})
    if options.isa == "avx2":
        environment.update(ONLY_AVX2)
    rapt = Participant("rapt", [options.bench, "--serve", "--threads", str(threads), "--isa", options.isa], environment)
    worker = [sys.executable, HERE / "worker.py"]
    peers = [Participant(name, [*worker, name, str(threads)], environment) for name in options.peers]
    everyone = [rapt, *peers]

    def table(participants: list[Participant], shapes: list[dict], title: str, results: list[dict]) -> None:
        names = [participant.name for participant in participants]
        if PAIR in names:
            names.append("pytorch")
        print(f"\n{threads} {'thread' if threads == 1 else 'threads'}: best time, share of the limit, slowest round\n"
              + " | ".join(["    ", *(f"{TITLES[name]:>20}" for name in names), title]))
        for shape in shapes:
            if re.search(options.filter, shape["name"]):
                result = time_shape(shape, participants, options.seconds, notes)
                print(row(result, names), flush=True)
                results.append({"threads": threads, **result})

    try:
        for peer in peers.copy():
            try:
                peer.start()
            except Failure as failure:
                notes.append(f"{TITLES[peer.name]}: {failure}")
                everyone.remove(peer)
        shapes = rapt.ask("shapes")
        report["rapt"] = rapt.about
        report["versions"].update({peer.name: peer.about["version"] for peer in everyone[1:]})
        alone = [participant for participant in everyone if participant.name != PAIR]
        pair = [participant for participant in everyone if participant.name in ("rapt", PAIR)]
        if len(alone) > 1 or len(pair) == 1:
            table(alone, shapes, "best peer / Rapt", report["results"])
        if len(pair) > 1:
            layer = next(shape for shape in shapes if shape["name"] == "L1")
            table(pair, [*shapes, *encoders(layer)], "PyTorch / rapt.torch", report["rapt_torch"])
    finally:
        for participant in everyone:
            participant.end()


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the shapes of bench/bench.c in Rapt and its peers, in turn.")
    parser.add_argument("--bench", type=Path, required=True, help="the built rapt_bench")
    parser.add_argument("--threads", type=int, help="default: 1, then all")
    parser.add_argument("--filter", default="", help="part of a shape's name, or a regular expression for it")
    parser.add_argument("--seconds", type=float, default=20, help=f"for each shape; at least {LEAST_ROUNDS} rounds")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=PEERS, help=",".join(PEERS))
    parser.add_argument("--isa", default="auto", help="Rapt's; avx2 also limits the peers that can be limited")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"--peers {','.join(unknown)}: none of {', '.join(PEERS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that participants are ended

    commit = os.environ.get("RAPT_COMMIT", "")
    report = {"cpu": cpu_name(), "commit": commit, "dtype": "f32", "versions": {}, "results": [], "rapt_torch": []}
    notes: list[str] = []
    cores = len(os.sched_getaffinity(0))
    for threads in dict.fromkeys([options.threads] if options.threads else [1, cores]):
        measure(options, threads, report, notes)

    rapt = report["rapt"]
    versions = [f"{TITLES[name]} {version}" for name, version in report["versions"].items()]
    print(f"\n{report['cpu']}: Rapt {rapt['version']} ({rapt['isa']}, {rapt['compiler']})", *versions, sep=", ")
    print("Above 1, Rapt is faster. Peers are called from Python, which costs microseconds a call: it shows in S1.")
    if PRODUCTS_ONLY & set(report["versions"]):
        print("* the matrix products alone, without the softmax; not counted as a peer")
    if options.isa == "avx2":
        print("ONNX Runtime, and OpenVINO in part, cannot be kept from wider vectors than AVX2.")
    for note in dict.fromkeys(notes):
        print("left out:", note)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


main()
