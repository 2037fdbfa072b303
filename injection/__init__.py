"""Labelled failures of LLM multi-agent systems on demand, proved by replay. No torch.

    session      the one place through which every call goes; `Call`, `Run`, `Session`
    systems      debate, DyLAN, MacNet, AgentVerse, orchestrator, manager with searcher
    tasks        published task files and small sets of our own; `checkers` judge answers
    scripted     agents without a model that really compute; `endpoint` is a real one
    rules        the 14 modes made from the text of a turn; `instructions` are orders for prompts
    manipulator  one attack on one run; `plans` say which, `proof` says whether it was the cause
    records      the AEGIS schema and more, append-only; `report` and `probes` look at them
    intervene    help one agent at a time; `importance` weighs agents; `repair` feeds back
    run          all of it, resumable; `logs` is for logs that nobody can run again

`python -m injection run --config configs/injection/offline.yaml` needs no network and no model.
"""
