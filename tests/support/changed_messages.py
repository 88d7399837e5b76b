"""Messages of the engine, counted or changed on purpose."""

from ring_dilated_attention.engine import ring, transfer


def lose_returned_gradients(patch):
    """From now on no rank adds what others computed for its rows."""
    patch.setattr(transfer, "add_returned", lambda *_: None)


def change_rows(patch, change):
    """From now on ranks send what `change` makes of each message."""
    pack = transfer.pack
    patch.setattr(transfer, "pack", lambda *given: change(pack(*given)))


def count_bytes(patch, count):
    """From now on ``count(what, nbytes)`` is called for each tensor that messages take.

    ``"packed"`` is what is sent, ``"spread"`` what is received where it is a tensor of its own, and
    the own rows between, if there are any, and ``"returned"`` gradients that have been returned.
    """

    def counted(module, name, told):
        original = getattr(module, name)

        def call(*given):
            found = original(*given)
            told(found, *given)
            return found

        patch.setattr(module, name, call)

    counted(transfer, "pack", lambda packed, *_: count("packed", packed.nbytes))
    counted(
        transfer,
        "spread",
        lambda slots, rows, _: count("spread", 0 if slots is rows else slots.nbytes),
    )
    counted(transfer, "add_returned", lambda _, dk, dv, rows, sent: count("returned", rows.nbytes))
    counted(ring, "of_all", lambda _, rows: count("spread", rows.slots.nbytes))
