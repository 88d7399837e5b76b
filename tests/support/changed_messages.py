"""Messages of the engine, and what ranks count of them, changed on purpose."""

from ring_dilated_attention.checks.simulation import Turns
from ring_dilated_attention.engine import transfer


def lose_returned_gradients(patch):
    """From now on no rank adds what others computed for its rows."""
    patch.setattr(transfer, "add_returned", lambda *_: None)


def change_rows(patch, change):
    """From now on ranks send what `change` makes of each message."""
    pack = transfer.pack
    patch.setattr(transfer, "pack", lambda *given: change(pack(*given)))


def send_a_byte_more(patch, ranks):
    """From now on these ranks of a simulation count a byte more in each of their transfers."""
    start = Turns.start

    def counted(self, send, receive):
        if self.rank in ranks and send is not None:
            self.sent_bytes += 1
        return start(self, send, receive)

    patch.setattr(Turns, "start", counted)
