"""Bytes that a simulated rank sends beside those of its plan."""

from ring_dilated_attention.checks.simulation import Turns


def send_a_byte_more(patch, ranks):
    """From now on these ranks of a simulation count a byte more in each of their transfers."""
    start = Turns.start

    def counted(self, send, receive):
        if self.rank in ranks and send is not None:
            self.sent_bytes += 1
        return start(self, send, receive)

    patch.setattr(Turns, "start", counted)
