"""Test that a hang is told in at most 12 lines: the collective, who has come to it and who has not.

There are four processes in two rows and two columns: `rows` joins 0 with 1 and 2 with 3, `columns` 0 with 2 and 1 with
3.
"""

import faulthandler
import tempfile
import threading
from dataclasses import replace

import pytest

from meshkit.errors import ConfigError
from meshkit.runs.hang import MOST_LINES, StepCollective, StepOrder, Witness, name_hang, read_order
from meshkit.runs.limits import Limits, limits_of_environment

ROWS, COLUMNS, ALL = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),)


def collective(name, grouping, payload_bytes=1024, **more):
    return StepCollective(name, "all-reduce", ("data",), "infiniband", payload_bytes, "model.py:7", grouping, **more)


FIRST, SECOND, THIRD = collective("first", 0), collective("second", 1, 4096), collective("third", 2, 2048)
ORDER = StepOrder(4, (ROWS, COLUMNS, ALL), (FIRST, SECOND, THIRD))
IN_STEP = [Witness(p, "step", 7, 11.0) for p in range(4)]


def with_one(process, **changes):
    return [replace(w, **changes) if w.process == process else w for w in IN_STEP]


def said(witnesses, order: StepOrder | None = ORDER):
    hang = name_hang(witnesses, order)
    return hang, "\n".join(hang.lines(witnesses, "run/hang"))


@pytest.mark.parametrize("process", range(4))
@pytest.mark.parametrize(("phase", "step"), [("data", 7), ("save", 6), ("evaluate", 6), ("check", 6)])
def test_who_has_not_entered_the_step_is_named_with_the_collective_that_needs_it(process, phase, step):
    """Its neighbour in the row waits for it; the other two come as far as the second and wait for those in turn."""
    hang, text = said(with_one(process, phase=phase, step=step))
    assert (hang.missing, hang.candidates, hang.exact) == ((process,), (FIRST,), True)
    neighbour = process ^ 1
    assert f"process {process} has not entered step 7" in text
    assert "collective 1 of 3 of the step: first (all-reduce over data, infiniband, 1.00 KiB) of model.py:7" in text
    assert f"process {neighbour} entered it, process {process} did not" in text
    assert "wait in turn, first in second" in text
    assert f"in phase '{phase}' at step {step} for 11 s" in text


@pytest.mark.parametrize(
    ("phase", "step", "first"),
    [("data", 6, 6), ("save", 5, 6), ("check", 6, 7), ("data", 7, 7), ("init", 0, 7), ("step", 6, 7)],
)
def test_others_that_have_dispatched_a_further_step_wait_in_the_first_that_is_not_entered(phase, step, first):
    """As on GPUs, where a process reads the numbers of step 6 once it has dispatched step 7."""
    hang, _ = said(with_one(1, phase=phase, step=step))
    assert hang.head == f"process 1 has not entered step {first}, in which processes 0, 2-3 wait"


def test_who_waits_where_if_one_never_comes():
    """Without 3, 2 waits in the row; 0 and 1 then wait for 2 and 3 in the columns."""
    assert ORDER.blocked([3]) == {2: 0, 0: 1, 1: 1}
    assert ORDER.blocked([0, 1]) == {2: 1, 3: 1}
    assert ORDER.blocked([]) == {}


def test_a_whole_row_that_is_late_is_missed_by_the_columns():
    late = [replace(w, phase="data") if w.process < 2 else w for w in IN_STEP]
    hang, text = said(late)
    assert (hang.missing, hang.candidates) == ((0, 1), (SECOND,))
    assert "processes 2-3 entered it, processes 0-1 did not" in text


def test_where_all_are_in_the_step_at_most_three_candidates_are_told_and_said_to_be_such():
    many = replace(ORDER, collectives=tuple(collective(f"c{i}", i % 3, 100 + i) for i in range(20)))
    hang, text = said(IN_STEP, many)
    assert ([c.name for c in hang.candidates], hang.exact) == (["c19", "c18", "c17"], False)
    assert "candidates (the processes wait in one of 20 collectives; these 3 have the most bytes):" in text


def test_of_a_stopped_process_only_collectives_that_need_it_are_candidates():
    hang, text = said(with_one(1, note="has been stopped (SIGSTOP)"), replace(ORDER, groupings=(ROWS, ((0, 2),), ALL)))
    assert (hang.missing, hang.candidates) == ((1,), (THIRD, FIRST))
    assert "all processes have entered step 7 and wait in it; process 1 has been stopped (SIGSTOP)" in text


CALLBACK = """Thread 0x01 (most recent call first):
  File "/home/me/reader.py", line 3 in look_up
  File "/env/site-packages/jax/_src/callback.py", line 90 in pure_callback_impl

Current thread 0x02 (most recent call first):
  File "/env/site-packages/jax/_src/array.py", line 696 in _value
  File "/home/me/train.py", line 12 in <module>
"""


def test_a_callback_that_does_not_return_leaves_the_collective_behind_it():
    order = replace(ORDER, collectives=(FIRST, replace(SECOND, after_callback=True), THIRD))
    hang, text = said(with_one(2, stack=CALLBACK), order)
    assert ([c.name for c in hang.candidates], hang.missing) == (["second"], (2,))
    assert "in process 2 a device waits for a callback into Python" in text
    assert "home/me/reader.py:3 in look_up" in text
    assert hang.exact is False


def test_of_many_behind_callbacks_the_first_in_the_step_are_told_whatever_their_bytes():
    behind = tuple(collective(f"c{i}", 2, 100 + i, after_callback=True) for i in range(20))
    hang, text = said(with_one(2, stack=CALLBACK), replace(ORDER, collectives=(THIRD, *behind)))
    assert [c.name for c in hang.candidates] == ["c0", "c1", "c2"]
    assert "wait in one of 20 collectives; these 3 come first, each behind a callback):" in text


def test_who_gives_no_answer_is_not_taken_for_one_outside_of_the_step():
    hang, text = said([Witness(0), *IN_STEP[1:]])
    assert (hang.missing, hang.exact) == ((0,), False)
    assert "process 0 gave no answer; the others have entered step 7" in text
    late, text = said([Witness(0), replace(IN_STEP[1], phase="data"), *IN_STEP[2:]])
    assert (late.missing, late.exact) == ((0, 1), False)


@pytest.mark.parametrize(
    ("phases", "missing", "head"),
    [
        (["data"], (2,), "the process does not get on in phase 'data'"),
        (["step"], (), "all processes of this host have entered step 7 and wait in it"),
        (["step", "step"], (), "all processes of this host have entered step 7 and wait in it"),
        (["step", "data"], (3,), "process 3 has not entered step 7, in which process 2 waits"),
    ],
)
def test_of_a_host_that_knows_nothing_of_the_others_only_its_own_processes_are_judged(phases, missing, head):
    here = [replace(IN_STEP[2 + i], phase=phase) for i, phase in enumerate(phases)]
    hang = name_hang(here, ORDER, elsewhere=True)
    assert (hang.missing, hang.exact) == (missing, False)
    assert hang.head == f"{head}; nothing is known here of the other hosts"
    assert not missing or not hang.candidates  # another process may be the one that is waited for


def test_phases_before_the_first_step_are_told_by_how_far_each_has_come():
    compiled = [Witness(p, "compile", 0, 9.0, moves=4) for p in range(4)]
    hang, text = said([*compiled[:2], replace(compiled[2], moves=3), compiled[3]], None)
    assert (hang.missing, hang.candidates, hang.exact) == ((2,), (), True)
    assert "process 2 has not come as far as processes 0-1, 3, which wait in phase 'compile'" in text


def test_in_one_phase_who_is_elsewhere_in_it_than_most_others_is_named():
    waits = 'Thread 0x01 (most recent call first):\n  File "/home/me/barrier.py", line 4 in wait\n'
    writes = 'Thread 0x01 (most recent call first):\n  File "/home/me/storage.py", line 9 in write\n'
    saving = [Witness(p, "save", 6, 700.0, stack=writes if p == 1 else waits) for p in range(3)]
    hang, text = said(saving)
    assert (hang.missing, hang.candidates, hang.exact) == ((1,), (), True)
    assert "all processes are in phase 'save' at step 6, but process 1 is elsewhere in the code than the others" in text
    assert "me/storage.py:9 in write" in text
    assert said(saving[:2])[0].exact is False  # Of two processes, either may be the one.


def test_of_two_in_one_phase_who_waits_for_the_other_is_not_the_one_that_is_missing():
    """In a check of replicas process 0 waits for a device, but process 1 has not begun the check."""
    device = 'Thread 0x01 (most recent call first):\n  File "/e/site-packages/jax/_src/array.py", line 6 in _value\n'
    other = 'Thread 0x01 (most recent call first):\n  File "/home/me/hooks.py", line 9 in look\n'
    checking = [Witness(0, "check", 4, 11.0, stack=device), Witness(1, "check", 4, 11.0, stack=other)]
    hang, text = said(checking)
    assert (hang.missing, hang.exact) == ((1,), True)
    assert "process 1 does not wait for the others in it" in text
    hang, text = said([replace(checking[0], note="has been stopped (SIGSTOP)"), checking[1]])
    assert (hang.missing, hang.exact) == ((0,), True)
    assert "process 0 has been stopped (SIGSTOP)" in text


@pytest.mark.parametrize("changes", [{"phase": "data"}, {"stack": CALLBACK}, {"phase": None}])
def test_a_message_has_twelve_lines_at_most(changes):
    stack = "Thread 0x01 (most recent call first):\n" + "".join(f'  File "/a/b.py", line {i} in f\n' for i in range(99))
    witnesses = [replace(w, stack=stack, host="gpu7") for w in IN_STEP]
    for count in range(1, 5):
        late = [replace(w, **changes) if w.process < count else w for w in witnesses]
        _, text = said(late, replace(ORDER, collectives=(FIRST, SECOND, THIRD) * 9))
        assert len(text.splitlines()) <= MOST_LINES
        assert text.endswith("evidence: run/hang")


def test_a_stack_as_faulthandler_prints_it():
    def waits_for_ever():
        begun.set()
        ends.wait()

    begun, ends = threading.Event(), threading.Event()
    thread = threading.Thread(target=waits_for_ever)
    thread.start()
    begun.wait()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        found = Witness(0, "data", 1, stack=file.read()).frames()
    ends.set()
    thread.join()
    assert "tests/runs/test_hang.py" in found[0]
    assert "in test_a_stack_as_faulthandler_prints_it" in found[0]


def test_an_order_in_a_run_folder(tmp_path):
    assert read_order(tmp_path) is None
    ORDER.write(tmp_path)
    assert read_order(tmp_path) == ORDER
    (tmp_path / "hang" / "step.json").write_text('{"processes": 4, "groupings": [')
    assert read_order(tmp_path) is None


def test_limits_of_the_environment(monkeypatch):
    monkeypatch.delenv("MESHKIT_STALL_TIMEOUT", raising=False)
    assert limits_of_environment() == Limits()
    assert Limits().of("end") == 300
    monkeypatch.setenv("MESHKIT_STALL_TIMEOUT", "30 compile=7200")
    found = limits_of_environment()
    assert (found.of("step"), found.of("compile"), found.of("save"), found.of("end")) == (30, 7200, 180, 300)
    monkeypatch.setenv("MESHKIT_STALL_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="'soon' is no limit") as error:
        limits_of_environment()
    assert error.value.at == "MESHKIT_STALL_TIMEOUT"
