"""An agent of your own as the rollout of a run: any function that takes an OpenAI client and a task.

    rose run --set agent=examples/own_agent.py:play

It knows nothing of ROSE. The client speaks to the run's gateway, which keeps every token that was drawn, with its
log-probability and the version of the weights, so that the run can learn from what the agent did.
"""


def play(client, task):
    messages = [{"role": "user", "content": task.observation}]
    while not task.is_over:
        reply = client.chat.completions.create(
            model=task.model, messages=messages, max_tokens=task.max_tokens, temperature=task.temperature
        )
        words = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": words}, {"role": "user", "content": task.step(words)}]
