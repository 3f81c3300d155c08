"""Frames between the two processes of a worker."""

from outrider.front.frames import FrameReader, Kind, pack_frame


def test_frames_are_put_together_of_pieces_of_any_size():
    sent = [(Kind.OPENED, 1, b""), (Kind.MESSAGE, 2**32 - 1, b"abc" * 100), (Kind.LEFT, 1, b"")]
    data = b"".join(pack_frame(*frame) for frame in sent)
    for size in (1, 7, 100, len(data)):
        reader, found = FrameReader(), []
        for begin in range(0, len(data), size):
            found += reader.feed(data[begin : begin + size])
        assert found == sent
