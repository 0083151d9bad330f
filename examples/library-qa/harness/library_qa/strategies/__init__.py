"""Ways to answer: each module has `answer(task, library, chat) -> str`; the param `strategy` names one."""
