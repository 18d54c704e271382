"""The program set of the SGLang paper (arXiv:2312.07104, section 6) on data written here, and `select` alone."""

from __future__ import annotations

from bench.lang.programs import agents, chat, hellaswag, json_decoding, judge, mmlu, rag, react, select8, skeleton, tree
from bench.lang.programs._program import Program

PROGRAMS: dict[str, Program] = {
    program.name: program
    for program in (
        mmlu.PROGRAM,
        hellaswag.PROGRAM,
        react.PROGRAM,
        agents.PROGRAM,
        tree.PROGRAM,
        skeleton.PROGRAM,
        judge.PROGRAM,
        json_decoding.PROGRAM,
        *chat.PROGRAMS,
        rag.PROGRAM,
        select8.PROGRAM,
    )
}
