"""Write SQLite files as nsys exports them, from the ranges of nsys-jax's Parquet or by hand.

Tables and columns are those of nsys' "SQLite Export Schema Reference"
(docs.nvidia.com/nsight-systems/2021.5/nsys-exporter/exported_data.html), except those that nobody here reads.
"""

import sqlite3
from contextlib import closing

SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE ThreadNames (nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE TARGET_INFO_GPU (
    id INTEGER NOT NULL, name TEXT, totalMemory INTEGER, computeMajor INTEGER, computeMinor INTEGER);
CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER NOT NULL, severity INTEGER NOT NULL, text TEXT NOT NULL);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, text TEXT, globalTid INTEGER,
    textId INTEGER, domainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL,
    correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL,
    correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, graphNodeId INTEGER);
"""
NVTX_PUSH_POP, WARNING = 59, 2


class Export:
    """A database in memory; `write` puts it into a file."""

    def __init__(self, schema=SCHEMA):
        self.database = sqlite3.connect(":memory:")
        self.database.executescript(schema)
        self._strings, self._calls = {}, 0

    def add(self, table, *rows):
        """Add rows of equal keys."""
        names = ", ".join(f'"{name}"' for name in rows[0])
        values = ", ".join("?" for _ in rows[0])
        self.database.executemany(f"INSERT INTO {table} ({names}) VALUES ({values})", [tuple(r.values()) for r in rows])

    def string(self, text):
        """Return the id of a text."""
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 1
            self.add("StringIds", {"id": self._strings[text], "value": text})
        return self._strings[text]

    def range(self, text, start, end, thread, *, registered=True):
        """Add an NVTX range; of a registered text the table has only the id."""
        said = {"text": None, "textId": self.string(text)} if registered else {"text": text, "textId": None}
        where = {"start": start, "end": end, "eventType": NVTX_PUSH_POP, "globalTid": thread, **said}
        self.add("NVTX_EVENTS", where)

    def launch(self, at, thread):
        """Add a call of CUDA and return its correlation id."""
        self._calls += 1
        call = {"start": at, "end": at, "globalTid": thread, "correlationId": self._calls}
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", {**call, "nameId": self.string("cuLaunchKernel")})
        return self._calls

    def kernel(self, name, start, end, device, *, at, thread, node=None):
        """Add a kernel and the call that launched it."""
        what = {"demangledName": self.string(name), "graphNodeId": node}
        self._operation("KERNEL", start, end, device, at, thread, what)

    def copy(self, kind, start, end, device, *, at, thread):
        """Add a copy of a CUpti_ActivityMemcpyKind."""
        self._operation("MEMCPY", start, end, device, at, thread, {"copyKind": kind, "bytes": 4})

    def _operation(self, table, start, end, device, at, thread, what):
        where = {"start": start, "end": end, "deviceId": device, "streamId": 7, "globalPid": thread >> 24 << 24}
        self.add(f"CUPTI_ACTIVITY_KIND_{table}", {**where, "correlationId": self.launch(at, thread), **what})

    def write(self, path):
        path.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as file:
            self.database.commit()
            self.database.backup(file)
        return path


def export_of(rows, device_of):
    """Return the export whose projection onto the GPUs is the rows of nsys-jax's trace.parquet; a thunk is one kernel.


    Args:
        rows: as dictionaries.
        device_of: thread -> the device that it launches on.
    """
    made = Export()
    holds = {row["ParentId"] for row in rows if "Thunk:#" in row["Name"]}
    for thread, device in device_of.items():
        now, opened = 0, []  # This is the host's time.
        global_tid = rows[0]["PID"] << 24 | thread

        def close(until, opened=opened, global_tid=global_tid):
            nonlocal now
            while opened and opened[-1][0] != until:
                _, text, start = opened.pop()
                now += 1
                made.range(text, start, now, global_tid, registered="Thunk" in text)

        for row in sorted((r for r in rows if r["TID"] == thread), key=lambda r: r["RangeId"]):
            close(row["ParentId"])
            now += 1
            text = row["Name"].removeprefix("TSL:")  # The domain is a column of its own.
            opened.append((row["RangeId"], text, now))
            if "Thunk:#" in text and row["RangeId"] not in holds:
                now += 1
                start = row["Projected Start"]
                name = text.split("hlo_op=")[1].rstrip("#")
                made.kernel(name, start, start + row["Projected Duration"], device, at=now, thread=global_tid)
        close(None)
    return made


def made(run=range(3), *, apart=False):
    """Two processes of one GPU each that run `jit_f`: a matmul, an all-gather at its end, one copy before.

    Args:
        run: numbers of its executions.
        apart: the all-gather is launched on a thread of its own, outside of the module, as XLA does since 2026.
    """
    export = Export()
    export.add("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": 10**18})
    gpu = {"id": 0, "name": "H100", "totalMemory": 80 * 10**9, "computeMajor": 9, "computeMinor": 0}
    export.add("TARGET_INFO_GPU", gpu)
    for process, device in ((31, 1), (30, 0)):
        thread = process << 24 | process
        export.copy(1, 900, 950, device, at=100, thread=thread)
        for i in run:
            at, on_gpu = 1000 * (i + 1), 10_000 * (i + 1)
            export.range("XlaModule:#hlo_module=jit_f,program_id=7#", at, at + 900, thread, registered=False)
            export.range("Thunk:#name=jit(f)/dot[a=(1,),b],hlo_op=dot.1#", at + 10, at + 90, thread)
            export.kernel("gemm", on_gpu, on_gpu + 6000, device, at=at + 50, thread=thread)
            export.range("Thunk:#hlo_op=while.4#", at + 100, at + 800, thread)
            by, more = (thread + 1, ",unique_hlo_op_id=4294967298") if apart else (thread, "")
            export.range(f"Thunk:#hlo_op=all-gather-start.2{more}#", at + 200, at + 300, by)
            name, start = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", on_gpu + 5000
            export.kernel(name, start, start + 4000, device, at=at + 250, thread=by)
    return export
