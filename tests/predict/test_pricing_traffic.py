"""Test collectives that are in flight at once."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.predict.kernels import KernelWork
from meshkit.predict.pricing import InFlight, Load, Transfer


def ends(*transfers, at=None):
    """Return when each transfer ends, on a stream of its own, started at 0 or at the times given."""
    traffic = InFlight(lambda *_: None)
    flows = [traffic.start(t, n, (at or {}).get(n, 0.0), n) for n, t in enumerate(transfers)]
    traffic.drained()
    return [flow.end for flow in flows]


def inside(wire, latency=0.0, share=1.0):
    return Transfer(wire + latency, share * wire, 0.0, wire)


def outside(wire, latency=0.0, share=1.0):
    return Transfer(wire + latency, 0.0, share * wire, wire)


def test_on_one_link_both_take_the_sum_and_on_two_the_longer():
    assert ends(inside(3.0), inside(3.0)) == pytest.approx([6.0, 6.0])
    assert ends(inside(3.0), outside(2.0)) == pytest.approx([3.0, 2.0])


def test_latency_is_shared_with_nobody():
    """The second sends alone for 1 s of its 3 while the first waits, and then both share."""
    assert ends(inside(3.0, 1.0), inside(3.0)) == pytest.approx([6.0, 5.0])


def test_parts_of_a_link_that_fit_do_not_slow_each_other():
    assert ends(inside(2.0, share=0.4), inside(2.0, share=0.6)) == pytest.approx([2.0, 2.0])
    # One has 0.2 of a link and two have 1.0: the small one gets no more speed than the others until the link is full.
    assert ends(inside(1.0, share=0.2), inside(1.0), inside(1.0))[1:] == pytest.approx([2.2, 2.2])


def test_one_that_a_full_link_holds_leaves_its_other_link_to_others():
    """A ring over hosts, held to half by another on the NIC, takes a quarter of NVLink instead of half: 3 s take 4."""
    ring = Transfer(4.0, 2.0, 4.0, 4.0)
    assert ends(ring, outside(4.0), inside(3.0))[2] == pytest.approx(4.0)


def test_what_starts_later_slows_what_is_in_flight():
    assert ends(inside(2.0), inside(2.0), at={1: 1.0}) == pytest.approx([3.0, 4.0])


def test_a_stream_runs_its_own_in_order():
    traffic, order = InFlight(lambda start, end, label: order.append((start, end, label))), []
    for label in range(3):
        traffic.start(inside(1.0), label, 0.0, 0)
    assert traffic.drained() == pytest.approx(3.0)
    assert order == [(0.0, 1.0, 0), (1.0, 2.0, 1), (2.0, 3.0, 2)]


def test_a_kernel_is_slowed_by_the_one_that_runs_and_that_is_slowed_by_its_link():
    load = Load(arithmetic=0.5)
    traffic = InFlight(lambda *_: None)
    for stream in (0, 1):
        traffic.start(Transfer(1.0, 1.0, 0.0, 1.0, load=load), stream, 0.0, stream)
    # Both run for 2 s, during which only the least is left, 0.4 s of work; then the kernel runs alone.
    assert traffic.run_kernel(KernelWork(arithmetic_s=1.0), 0.0) == pytest.approx(2.0 + 0.6)


def test_no_link_carries_more_than_it_can():
    """Whatever starts when, the last ends no earlier than each link needs, and no later than one after the other."""
    kinds = [inside(2.0, 0.3), outside(1.0, 0.1), Transfer(1.5, 0.6, 1.4, 1.4), inside(0.5, share=0.3)]
    for some in itertools.product(kinds, repeat=3):
        for late in (0.0, 0.7, 1.9):
            last = max(ends(*some, at={2: late}))
            assert last >= max(sum(t.inside_s for t in some), sum(t.outside_s for t in some)) - 1e-9
            assert last >= max(t.seconds for t in some) - 1e-9
            assert last <= late + sum(t.seconds for t in some) + 1e-9


def gather(memory):
    """Return a collective of 2 s that leaves this share of memory's bandwidth."""
    return Transfer(2.0, 2.0, 0.0, 2.0, load=Load(memory=memory))


@pytest.mark.parametrize(
    ("left", "memory_s", "kernel", "collective"),
    [
        (0.6, 1.0, 1 / 0.6, 2.0),  # The collective asks for less than half, and the kernel has the rest.
        # Both have half for 2 s, and then the collective has all that it wants.
        (0.2, 1.0, 2.0, 2.0 + 2.0 * (1 - 0.5 / 0.8)),
        (0.2, 0.4, 1.0, 2.0 + 1.0 * (1 - 0.6 / 0.8)),  # A matmul takes 0.4 of memory and leaves 0.6 for its second.
    ],
)
def test_a_kernel_and_a_collective_share_memory_and_neither_falls_below_half(left, memory_s, kernel, collective):
    traffic = InFlight(lambda *_: None)
    flow = traffic.start(gather(left), 0, 0.0, 0)
    assert traffic.run_kernel(KernelWork(arithmetic_s=1.0, memory_s=memory_s), 0.0) == pytest.approx(kernel)
    assert traffic.finished(flow) == pytest.approx(collective)


@given(left=st.floats(-0.5, 1.0), arithmetic=st.floats(0.0, 1.0), memory=st.floats(0.0, 1.0))
def test_what_both_take_of_memory_is_no_more_than_there_is(left, arithmetic, memory):
    work = KernelWork(arithmetic_s=arithmetic, memory_s=memory)
    slowdown, share = Load(memory=left).slowdowns(work)
    assert slowdown >= 1.0 - 1e-9
    assert 0.0 <= share <= 1.0
    if work.alone_s > 1e-6:
        assert memory / (slowdown * work.alone_s) + share * (1.0 - left) <= 1.0 + 1e-9
