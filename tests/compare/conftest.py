from __future__ import annotations

import json
import zipfile
from unittest import mock

import pytest
from made_runs import made_rank

from deep500_timing.compare import RunTimes


@pytest.fixture
def times():
    """Makes the times of a run without a run: those of one session follow each other by a minute."""

    def make(step_s, place, *, session="s", pair=None, side="", facts=None, **regions):
        start = 1_700_000_000.0 + 60 * place
        facts = {"cpu": "made", "cpus": "2"} | (facts or {})
        return RunTimes(
            f"run-{place}",
            step_s,
            regions or {"FORWARD": step_s / 2},
            steps=100,
            start_unix_s=start,
            end_unix_s=start + 50,
            facts=facts,
            program="p",
            machine=session,
            pair=pair,
            side=side,
        )

    return make


@pytest.fixture
def write_run(tmp_path):
    """Writes a run by the real log: steps of FORWARD and BACKWARD with the time between them."""

    def write(name, *, forward=0.02, backward=0.03, steps=60, ranks=1, slow=(), minute=0, measurement=None, cut=False):
        folder = tmp_path / name
        for rank in range(ranks):
            marks = {"DEEP500_TIMING_MEASUREMENT": json.dumps(measurement)} if measurement else {}
            began = 1_700_000_000_000_000_000 + minute * 60_000_000_000
            unix_time = mock.patch("deep500_timing._summary.snapshot.time.time_ns", return_value=began)
            made_up = made_rank(folder, rank, attributes={"batch_size": 8})
            with mock.patch.dict("os.environ", marks), made_up as made, unix_time:
                for step in range(steps):
                    with made.region("BATCH"):
                        made.spend("FORWARD", forward * (1.5 if (rank, step) in slow else 1))
                        made.spend("BACKWARD", backward)
                    made.wait(0.001)
                made.log.flush()
        if cut:
            for log in folder.glob("*.d5log"):
                data = log.read_bytes()
                log.write_bytes(data[: int(len(data) * 0.9)])
        return str(folder)

    return write


@pytest.fixture
def write_wheel():
    """Writes a wheel of one module, ``package``."""

    def write(folder, version, text):
        info = f"package-{version}.dist-info"
        with zipfile.ZipFile(folder / f"package-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("package.py", text)
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: package\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")

    return write
