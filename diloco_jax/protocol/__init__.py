"""The protocol: events in, actions out; standard library only.

`syncer.react` and `island.react` are pure functions of (state, event). They run
unchanged in virtual time, in threads and in processes.
"""
