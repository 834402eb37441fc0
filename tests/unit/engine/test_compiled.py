from maitred.engine import compiled


def test_kernels_compile_where_nothing_can_be_written(monkeypatch):
    options = []

    def njit(**given):
        options.append(given)
        if given.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(compiled.numba, "njit", njit)
    assert compiled.compiled(print) is print
    assert [given.get("cache", False) for given in options] == [True, False]
