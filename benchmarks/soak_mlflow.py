"""Ten thousand reports to a real MLflow server that is disturbed ten times: arrivals and losses.

    python benchmarks/soak_mlflow.py                    # a few minutes
    python benchmarks/soak_mlflow.py --reports 1000     # a shorter one

Two processes of four threads each report as training would, each thread to its own run, while the server (SQLite,
on the loopback interface) is disturbed in turn: held for two seconds, slowed by short holds, killed and started again.
Afterwards the database is asked its content. The program fails unless all that each exporter counts as delivered is
there, delivered and lost add up to the reports, and memory did not grow.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import closing
from pathlib import Path

PROCESSES, THREADS, DISTURBANCES = 2, 4, 10
PAUSE_S = 0.05
GROWTH_MIB = 20.0


class Server:
    """A real ``mlflow server`` over SQLite that can be started again."""

    def __init__(self, folder: Path) -> None:
        """Choose a port; nothing runs yet."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        self.folder = folder
        self.uri = f"http://127.0.0.1:{self.port}"
        self.database = folder / "mlflow.db"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.database}"]
        command += ["--artifacts-destination", str(self.folder)]
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        for _ in range(1200):
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"the server did not start, see {self.folder / 'log'}")

    def send(self, number: int) -> None:
        """Send a signal to the server and its workers."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it without asking."""
        self.send(signal.SIGKILL)
        self._process.wait()

    def hold(self, seconds: float) -> None:
        """Let it answer nothing for a while."""
        self.send(signal.SIGSTOP)
        time.sleep(seconds)
        self.send(signal.SIGCONT)

    def disturb(self, number: int) -> str:
        """Disturb it in one of three ways, in turn."""
        kind = ("held for 2 s", "slowed for 3 s", "killed and started again")[number % 3]
        if number % 3 == 0:
            self.hold(2.0)
        elif number % 3 == 1:
            for _ in range(15):
                self.hold(0.15)
                time.sleep(0.05)
        else:
            self.kill()
            self.start()
        return kind


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def worker(uri: str, reports: int, runs: list[str]) -> None:
    """Report from a thread for each run, and print the exporters' counts once the program has ended."""
    result: dict[str, object] = {}
    # Registered before the exporters register theirs, so called after pending reports.
    atexit.register(lambda: print(json.dumps({**result, **counts()}), flush=True))

    import mlflow

    from deep500_timing import Timer
    from deep500_timing.exporters import MlflowExporter

    mlflow.set_tracking_uri(uri)
    exporters = [MlflowExporter("soak", run_id=run, timeout_s=1.0, exit_timeout_s=60.0) for run in runs]
    waits: list[float] = []

    def counts() -> dict[str, object]:
        return {
            "delivered": [exporter.delivered for exporter in exporters],
            "lost": [exporter.lost for exporter in exporters],
            "pending": [exporter.pending for exporter in exporters],
            "threads": threading.active_count(),
        }

    def report(exporter: MlflowExporter) -> None:
        timer = Timer()
        for step in range(reports):
            timer.record("region", 0, 1000 + step)
            begin = time.perf_counter()
            timer.export(exporter, step=step)
            waits.append(time.perf_counter() - begin)
            if step == reports // 5:
                result.setdefault("resident_mib_early", _resident_mib())
            time.sleep(PAUSE_S)

    threads = [threading.Thread(target=report, args=(exporter,)) for exporter in exporters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result["resident_mib_late"] = _resident_mib()
    result["in_export_s"], result["longest_export_s"] = sum(waits), max(waits)
    # What of it was waiting for the server; the rest is computing, and waiting for a processor.
    result["waited_s"] = exporters[0]._caller()._waited_s


def main() -> None:
    """Run the soak and check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=10_000, help="in all (default: 10000)")
    parser.add_argument("--disturbances", type=int, default=DISTURBANCES, help="of the server (default: 10)")
    parser.add_argument("--worker", nargs=3, metavar=("URI", "REPORTS", "RUNS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        uri, reports, runs = arguments.worker
        worker(uri, int(reports), runs.split(","))
        return
    each = arguments.reports // (PROCESSES * THREADS)
    with tempfile.TemporaryDirectory() as name:
        server = Server(Path(name))
        server.start()
        try:
            found, disturbed, seconds = _soak(server, each, arguments.disturbances)
            there = _there(server.database)
        finally:
            server.kill()
    _judge(found, there, disturbed, each, seconds)


def _soak(server: Server, each: int, disturbances: int) -> tuple[list[tuple[list[str], dict]], list[str], float]:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=server.uri)
    runs = [[client.create_run("0").info.run_id for _ in range(THREADS)] for _ in range(PROCESSES)]
    begin = time.monotonic()
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", server.uri, str(each), ",".join(own)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for own in runs
    ]
    disturbed = []
    for number in range(disturbances):
        time.sleep(3.0)
        disturbed.append(server.disturb(number))
        print(f"  {time.monotonic() - begin:5.0f} s  the server was {disturbed[-1]}", flush=True)
    outputs = [child.communicate()[0] for child in children]
    found = [(own, json.loads(output.splitlines()[-1])) for own, output in zip(runs, outputs, strict=True)]
    return found, disturbed, time.monotonic() - begin


def _there(database: Path) -> dict[str, int]:
    with closing(sqlite3.connect(database)) as connection:
        return dict(connection.execute("SELECT run_uuid, COUNT(DISTINCT step) FROM metrics GROUP BY run_uuid"))


def _judge(
    found: list[tuple[list[str], dict]], there: dict[str, int], disturbed: list[str], each: int, seconds: float
) -> None:
    rows = [
        (run, there.get(run, 0), result["delivered"][place], result["lost"][place], result["pending"][place])
        for runs, result in found
        for place, run in enumerate(runs)
    ]
    arrived, delivered, lost = (sum(row[column] for row in rows) for column in (1, 2, 3))
    print(
        f"{each * len(rows)} reports in {seconds:.0f} s, {len(disturbed)} disturbances: {delivered} counted as "
        f"delivered, {lost} as lost; {arrived} are there"
    )
    for number, (_, result) in enumerate(found):
        print(
            f"process {number}: {result['resident_mib_early']:.1f} MiB early, {result['resident_mib_late']:.1f} MiB "
            f"late; its threads were in export for {result['in_export_s']:.1f} s in all, "
            f"{result['longest_export_s']:.2f} s at once, of it {result['waited_s']:.2f} s waiting for the server"
        )
    for run, arrived, delivered, lost, pending in rows:
        assert pending == 0, f"{run}: {pending} are neither delivered nor lost"
        assert delivered + lost == each, f"{run}: {delivered} delivered and {lost} lost of {each}"
        assert delivered <= arrived <= each, f"{run}: {delivered} counted as delivered, {arrived} there"
    for _, result in found:
        assert result["resident_mib_late"] - result["resident_mib_early"] < GROWTH_MIB, "memory grew"
    print("what was counted as delivered is there, delivered and lost add up, memory is flat")


if __name__ == "__main__":
    main()
