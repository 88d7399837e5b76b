"""Messages of the engine, counted or changed on purpose."""

from ring_dilated_attention.engine import arrived, messages, ring_call, transfer


def lose_returned_gradients(patch):
    """From now on no rank adds what others computed for its rows."""
    patch.setattr(transfer, "add_returned", lambda *_: None)


def change_rows(patch, change):
    """From now on ranks send what `change` makes of each message."""
    patch.setattr(transfer, "pack", lambda *given: change(messages.pack(*given)))


def count_bytes(patch, count):
    """From now on ``count(what, nbytes)`` is called for each tensor that messages take.

    ``"packed"`` is what is sent, ``"spread"`` what is received where it is a tensor of its own, and
    the own rows between, if there are any, and ``"returned"`` gradients that have been returned.
    """

    def pack(*given):
        packed = messages.pack(*given)
        count("packed", packed.nbytes)
        return packed

    def spread(rows, index):
        slots = messages.spread(rows, index)
        count("spread", 0 if slots is rows else slots.nbytes)
        return slots

    def add_returned(dkey, dvalue, rows, index):
        count("returned", rows.nbytes)
        messages.add_returned(dkey, dvalue, rows, index)

    def of_all(rows):
        count("spread", rows.slots.nbytes)
        return arrived.of_all(rows)

    for function in (pack, spread, add_returned):
        patch.setattr(transfer, function.__name__, function)
    patch.setattr(ring_call, "of_all", of_all)
