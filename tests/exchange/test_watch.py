"""The watch over transfers of streams, which are events here that somebody sets, or nobody."""

import threading
import time
from types import SimpleNamespace

import pytest

from ring_dilated_attention.exchange import ExchangeError, watch
from ring_dilated_attention.exchange.calls import Calls, Finding, LostPeerError
from ring_dilated_attention.exchange.watch import Gate, UnderWay, Watch


class Ranks:
    """What is known of the others: a `calls.Roll`."""

    def __init__(self):
        self.gone, self.failure, self.waiting = set(), None, []

    def begin(self, call):
        pass

    def end(self):
        pass

    def waits_for(self, rank, *, on_stream=False):
        assert on_stream
        self.waiting.append(rank)

    def look(self, peers):
        if self.gone & set(peers):
            raise LostPeerError(peers)

    def fail(self, finding):
        self.failure = finding

    def failed(self):
        return self.failure

    def explain(self, lost):
        what = "has gone" if lost.waited is None else f"did not answer within {lost.waited:g} s"
        return Finding(lost.peers[0], f"rank {lost.peers[0]} {what}")


@pytest.fixture
def world(monkeypatch):
    """A rank that watches; `stuck` are events of transfers, which `release` sets."""
    monkeypatch.setattr(watch, "LOOK_S", 0.005)
    monkeypatch.setattr(watch, "STUCK_S", 0.02)
    ranks = Ranks()
    calls = Calls(0, 3, ranks, main=threading.current_thread())
    with calls.enter("a_call", "forward"):
        pass
    world = SimpleNamespace(ranks=ranks, calls=calls, stuck=[], released=[])

    def release(is_done):
        world.released.append(ranks.failure)
        for event in world.stuck:
            event.set()
        assert is_done()

    def add(*peers, begins=True):
        done = threading.Event()
        world.stuck.append(done)
        world.watch.add(UnderWay(lambda: begins, done.is_set, peers))
        return done

    world.watch, world.add = Watch(calls, ranks, release, 0.3), add
    yield world
    for event in world.stuck:
        event.set()


def use_time(seconds):
    """Python that runs for some time, as a user's does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.001)


def test_transfers_that_end_are_left_alone(world):
    for _ in range(3):
        done = world.add(1)
        use_time(0.05)
        done.set()
    use_time(0.05)
    assert not world.released
    assert set(world.ranks.waiting) <= {1, None}
    world.calls.enter("a_call", "forward").__exit__(None, None, None)


def test_a_rank_that_has_gone_ends_the_wait(world):
    world.ranks.gone = {2}
    done = world.add(2)
    with pytest.raises(ExchangeError, match="rank 2 has gone; this is rank 0, whose calls up to"):
        use_time(20)
    assert done.wait(10)
    assert world.released == [Finding(2, "rank 2 has gone")]  # the others knew before
    with pytest.raises(ExchangeError, match="cannot be used any more: rank 2 has gone"):
        world.calls.enter("a_call", "forward")
    use_time(0.05)  # and it says so once


def test_a_rank_that_does_not_answer(world):
    world.add(1)
    with pytest.raises(ExchangeError, match=r"rank 1 did not answer within 0\.3 s"):
        use_time(20)


def test_what_another_rank_says_ends_the_wait_at_once(world):
    world.add(1, begins=False)
    world.ranks.failure = Finding(2, "rank 2 failed")
    with pytest.raises(ExchangeError, match="rank 2 failed"):
        use_time(20)


def test_who_fails_by_itself_says_it_once(world):
    world.add(1)
    with pytest.raises(MemoryError), world.calls.enter("a_call", "forward"):
        raise MemoryError("no memory")
    while not world.released:  # nothing else is raised
        use_time(0.01)
    assert "failed in call 2 (a_call, forward): MemoryError: no memory" in world.ranks.failure.text


def test_a_watch_that_fails_says_so(world):
    """Else nobody would find that a rank has gone."""

    def look(peers):
        raise OSError("too many open files")

    world.ranks.look = look
    done = world.add(1)
    with pytest.raises(ExchangeError, match=r"^rank 0 cannot watch its transfers: OSError"):
        use_time(20)
    assert done.wait(10)


def test_streams_are_let_go_when_a_rank_that_has_failed_ends(world):
    """Python may end before the watch finds that, and the process may wait for its streams."""
    world.ranks.failed = lambda: None
    done = world.add(1)
    with pytest.raises(MemoryError), world.calls.enter("a_call", "forward"):
        raise MemoryError("no memory")
    assert not done.is_set()
    world.watch.end()
    assert done.is_set()


def test_a_watch_ends_with_its_transport(world):
    threads = threading.active_count()
    world.watch = None
    end = time.monotonic() + 10
    while threading.active_count() >= threads and time.monotonic() < end:
        time.sleep(0.005)
    assert threading.active_count() < threads


class Late:
    """An agreement of a call that has returned, which finds that the ranks differ."""

    before_rows = False

    def __init__(self):
        self.error, self.known = ExchangeError("ranks are in different calls"), threading.Event()
        self.finding, self.is_found = threading.Lock(), False

    def is_done(self):
        return self.known.is_set()

    def failure(self, scope):
        if not self.known.is_set():
            return None
        self.find(scope)
        return self.error

    def __call__(self, scope):
        self.find(scope)
        raise self.error

    def is_found_by_the_watch(self):
        self.known.set()
        use_time(20)

    def find(self, scope):
        with self.finding:
            if not self.is_found:
                self.is_found = True
                scope.differ(str(self.error))


def test_ranks_that_turn_out_to_differ_are_told_once(world):
    """Whoever found it has let the streams go on; the ranks may go on too."""
    late = Late()
    with world.calls.enter("a_call", "forward"):
        world.calls.agree_later(late)
    use_time(0.05)
    with pytest.raises(ExchangeError, match="are in different calls; this is rank 0, whose calls"):
        late.is_found_by_the_watch()
    use_time(0.05)
    with world.calls.enter("a_call", "forward") as scope:
        assert scope.call.number == 3
    assert not world.released


def test_the_next_call_says_that_ranks_differ_and_the_watch_does_not_say_it_again(world):
    late = Late()
    with world.calls.enter("a_call", "forward"):
        world.calls.agree_later(late)

    def call():
        late.known.set()
        world.calls.enter("a_call", "forward")

    with pytest.raises(ExchangeError, match=r"^ranks are in different calls"):
        call()
    use_time(0.05)
    with world.calls.enter("a_call", "forward") as scope:
        assert scope.call.number == 3


def test_a_transfer_that_is_being_begun_is_ended_afterwards():
    gate, begun, may_go_on, order = Gate(), threading.Event(), threading.Event(), []

    def begin():
        begun.set()
        may_go_on.wait()
        order.append("begun")

    thread = threading.Thread(target=gate.begin, args=[begin])
    thread.start()
    begun.wait()
    threading.Timer(0.02, may_go_on.set).start()
    gate.shut()
    order.append("ended")
    thread.join()
    assert order == ["begun", "ended"]
    with pytest.raises(LostPeerError):
        gate.begin(begin)
    assert len(order) == 2


def test_who_waits_for_a_stream_is_told_before_it_goes_on(world):
    """Else it may read what the stream did not receive, or end, before it hears of that."""
    may_go_on, goes_on = threading.Event(), threading.Lock()
    goes_on.acquire()

    def let_go():
        """As NCCL does: streams go on at once, and ending the rest takes time."""
        may_go_on.wait()
        goes_on.release()
        time.sleep(0.2)

    calls = Calls(0, 3, world.ranks, main=threading.current_thread(), begin_anew=let_go)
    watched = Watch(calls, world.ranks, lambda is_done: None, 0.3)
    late = Late()
    with calls.enter("a_call", "forward"):
        calls.agree_later(late)

    def synchronize():
        late.known.set()
        threading.Timer(0.05, may_go_on.set).start()
        goes_on.acquire()  # as torch does
        use_time(0.02)

    with pytest.raises(ExchangeError, match="are in different calls; this is rank 0, whose calls"):
        synchronize()
    with calls.enter("a_call", "forward") as scope:  # waits until all has been let go
        assert scope.call.number == 2
    watched.end()


@pytest.mark.parametrize(
    ("gone", "begins", "seconds"),
    [(2, True, 0.1), (1, False, 0.5)],  # what has begun may take 0.3
    ids=["of another rank", "yet to be computed"],
)
def test_a_rank_that_is_not_waited_for_may_go(world, gone, begins, seconds):
    world.ranks.gone = {gone}
    done = world.add(1, begins=begins)
    use_time(seconds)
    done.set()
    use_time(0.05)
    assert not world.released


@pytest.mark.parametrize("why", ["ranks differ", "a rank is lost"])
def test_a_transfer_that_is_ended_says_why(world, why):
    """On GPUs the watch ends transfers that another thread may be beginning."""
    late = Late()

    def call():
        with world.calls.enter("a_call", "forward"):
            if why == "ranks differ":
                world.calls.agree_later(late)
                late.known.set()
            else:
                world.calls.fail(Finding(1, "rank 1 has gone"))
            raise RuntimeError("NCCL communicator was aborted")

    said = {
        "ranks differ": "^ranks are in different calls",
        "a rank is lost": "^rank 1 has gone; this is rank 0 in call 2",
    }
    with pytest.raises(ExchangeError, match=said[why]):
        call()
    use_time(0.05)  # nothing else is raised
