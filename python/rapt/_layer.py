class KVCache:
    pass


class MultiheadAttention:
    pass


def layers():
    pass


def load():
    pass
