"""Provide workers that plan nothing: a function of the settings makes each outcome."""

from meshkit.search import workers as pool


class MadeUpWorkers(pool.Workers):
    def __init__(self, outcome):
        self.outcome, self.jobs, self.waiting, self.planned = outcome, 1, [], []

    def install(self, monkeypatch):
        """Replace the processes of pools that are opened later."""

        def open_pool(_request, jobs=None, _log=None):
            self.jobs = jobs or 2
            return self

        monkeypatch.setattr(pool, "Workers", open_pool)
        return self

    def submit(self, settings):
        self.waiting.append(settings)

    def next(self):
        settings = self.waiting.pop(0)
        self.planned.append(settings)
        return self.outcome(settings)

    def close(self):
        pass
