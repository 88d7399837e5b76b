"""The watch over transfers of streams, which are events here that somebody sets, or nobody."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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


def test_a_rank_that_is_not_waited_for_may_go(world):
    world.ranks.gone = {2}
    done = world.add(1)
    use_time(0.1)
    done.set()
    use_time(0.05)
    assert not world.released


def test_a_rank_that_does_not_answer(world):
    world.add(1)
    with pytest.raises(ExchangeError, match=r"rank 1 did not answer within 0\.3 s"):
        use_time(20)


def test_what_has_yet_to_be_computed_is_not_waited_for(world):
    world.ranks.gone = {1}
    world.add(1, begins=False)
    use_time(0.5)
    assert not world.released


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


def test_who_ends_a_watch_says_why(world):
    """It may be asking why a rank is lost when that is known to be in vain."""
    asked, may_say = threading.Event(), threading.Event()

    def explain(lost):
        asked.set()
        may_say.wait()
        return Finding(1, "rank 1 has gone")

    world.ranks.explain = explain
    world.add(1)
    world.ranks.gone = {1}
    asked.wait()
    threading.Timer(0.02, may_say.set).start()
    world.watch.end()
    use_time(0.05)
    assert world.ranks.failure is None
    assert not world.released


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


def test_what_backward_says_in_a_thread_of_its_own_is_not_said_again(world):
    """As on GPUs: autograd's thread raises, while the thread that calls waits for it."""
    late, said, done = Late(), [], threading.Lock()
    done.acquire()
    with world.calls.enter("a_call", "forward"):
        world.calls.agree_later(late)
    caller = threading.get_ident()

    def wait():
        done.acquire()

    def backward():
        while sys._current_frames()[caller].f_code is not wait.__code__:
            time.sleep(0.001)
        late.known.set()
        world.calls.look_aside()  # the thread that calls is told, and has yet to hear of it
        try:
            world.calls.agree_now()
        except ExchangeError as error:
            said.append(error)
        finally:
            done.release()

    threading.Thread(target=backward).start()
    wait()
    use_time(0.05)
    assert len(said) == 1
    with world.calls.enter("a_call", "forward") as scope:
        assert scope.call.number == 3


def call_with_a_transfer_that_is_ended(world, meanwhile):
    """On GPUs the watch ends transfers that another thread may be beginning."""
    with world.calls.enter("a_call", "forward"):
        meanwhile()
        raise RuntimeError("NCCL communicator was aborted")


def test_a_transfer_that_is_ended_since_ranks_differ_says_that(world):
    late = Late()

    def differ():
        world.calls.agree_later(late)
        late.known.set()

    with pytest.raises(ExchangeError, match=r"^ranks are in different calls"):
        call_with_a_transfer_that_is_ended(world, differ)
    use_time(0.05)  # nothing else is raised
    with world.calls.enter("a_call", "forward") as scope:
        assert scope.call.number == 3


def test_a_transfer_that_is_ended_for_a_lost_rank_says_that(world):
    def lose():
        world.calls.fail(Finding(1, "rank 1 has gone"))

    with pytest.raises(ExchangeError, match=r"^rank 1 has gone; this is rank 0 in call 2"):
        call_with_a_transfer_that_is_ended(world, lose)
    use_time(0.05)


def test_a_call_that_the_error_has_kept_from_ending_is_over(world):
    """Python raises what a thread is told at the start of a function, `Scope.__exit__` included."""
    late = Late()
    scope = world.calls.enter("a_call", "forward")
    world.calls.agree_later(late)
    with pytest.raises(ExchangeError, match=r"^ranks are in different calls"):
        late.is_found_by_the_watch()
    assert scope.call.number == 2
    with world.calls.enter("a_call", "forward") as scope:
        assert scope.call.number == 3
    with world.calls.enter("a_call", "forward"), pytest.raises(ExchangeError, match="both use a"):
        world.calls.enter("a_call", "forward")


def test_what_has_ended_the_group_is_not_told_to_who_has_said_it(world):
    def lose():
        world.calls.fail(Finding(1, "rank 1 has gone"))

    with pytest.raises(ExchangeError, match=r"^rank 1 has gone; this is rank 0 in call 2"):
        call_with_a_transfer_that_is_ended(world, lose)
    world.calls.interrupt("rank 1 has gone")
    use_time(0.05)


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


def test_who_is_told_something_has_begun_its_transfer(world):
    """Half of one would leave a group of NCCL's open, or a stream that waits for good."""
    gate, order = Gate(), []
    calls = Calls(0, 3, world.ranks, main=threading.current_thread(), stop=gate.shut)

    def begin():
        threading.Thread(target=calls.interrupt, args=["rank 1 has gone"]).start()
        use_time(0.05)
        order.append("begun")

    def transfers():
        gate.begin(begin)
        use_time(20)

    with pytest.raises(ExchangeError, match="rank 1 has gone"):
        transfers()
    assert order == ["begun"]


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


class Dropped:
    """Python drops what is raised in here, and goes on."""

    def __del__(self):
        use_time(0.05)


def test_what_a_finalizer_drops_is_told_again(world):
    def drop():
        threading.Timer(0.02, partial(world.calls.interrupt, "rank 1 has gone")).start()
        Dropped().__del__  # noqa: B018
        use_time(1)

    with pytest.raises(ExchangeError, match="rank 1 has gone; this is rank 0, whose calls"):
        drop()
    use_time(0.05)  # nothing else is raised


def be_told(world):
    world.calls.interrupt("ranks are in different calls")
    use_time(20)


def in_another_thread(function):
    """What a function returns, called as autograd's thread calls backward."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


def test_a_call_that_the_error_has_kept_from_ending_is_over_for_backward_too(world):
    scope = world.calls.enter("a_call", "forward")
    with pytest.raises(ExchangeError, match="are in different calls"):
        be_told(world)
    assert scope.call.number == 2
    with in_another_thread(lambda: world.calls.enter("a_call", "backward")) as scope:
        assert scope.call.number == 3
    with world.calls.enter("a_call", "forward"), pytest.raises(ExchangeError, match="both use a"):
        in_another_thread(lambda: world.calls.enter("a_call", "forward"))


def test_a_thread_that_is_told_while_it_begins_a_call_is_in_none(world, monkeypatch):
    """It keeps others out by then, the last of which was another thread."""
    with in_another_thread(lambda: world.calls.enter("a_call", "backward")):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(world.ranks, "begin", lambda call: be_told(world))
        with pytest.raises(ExchangeError, match="are in different calls"):
            world.calls.enter("a_call", "forward")
    with in_another_thread(lambda: world.calls.enter("a_call", "backward")) as scope:
        assert scope.call.part == "backward"


def test_nobody_is_told_in_place_of_a_thread_that_has_ended(world):
    def call():
        with world.calls.enter("a_call", "forward"):
            return threading.current_thread()

    thread = in_another_thread(call)
    assert not thread.is_alive()
    thread._ident = threading.get_ident()  # the system gives its number to another one
    world.calls.interrupt("rank 1 has gone")
    use_time(0.05)
