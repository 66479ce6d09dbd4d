"""Episodes that somebody's own agent plays, through the gateway's OpenAI routes: the setting `agent`.

What the model wrote is the gateway's to know. It keeps the sampled ids with their log-probabilities and versions, and
hands them out with the batch; here is only how the episode went. So the trajectory that comes out of an episode has no
tokens yet, and there is nothing to compare with what comes back.

An agent that edits its conversation, or thinks in several requests, leaves more than one line of tokens (branches).
All of them come back under the name of the member, and all are learnt from, with the advantage of that member.
"""

from __future__ import annotations

from rose.core.trajectory import Trajectory
from rose.envs.agents import find_agent
from rose.envs.openai_agent import AgentFailed, AgentTask, Door, run_agent
from rose.envs.play import Episode
from rose.envs.registry import make_environment
from rose.envs.trouble import trouble_dice, troubled
from rose.launch.settings import RunSettings


class AgentEpisodes:
    """One per run. Episodes may be played at once: each agent has a thread and a client of its own."""

    def __init__(self, settings: RunSettings, door: Door) -> None:
        assert settings.agent is not None
        self._settings, self._door = settings, door
        self._agent = find_agent(settings.agent)

    async def play(self, episode: Episode, session: str) -> Trajectory:
        """Its trajectory is begun and finished by the caller; `session` names it to the gateway.

        Raises EnvironmentFailed.
        """
        settings, sampling = self._settings, episode.sampling
        dice = trouble_dice(settings.trouble, episode.trajectory_id)
        environment = make_environment(settings.environment, **settings.environment_options)
        task = AgentTask(
            episode.seed,
            self._door.model,
            troubled(environment, settings.trouble, dice),
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
        )
        seconds_max = settings.patience.agent_s_max
        verdict = await run_agent(self._agent, self._door, session, task, seconds_max)
        if not task.answers:
            hint = "it must ask through the client that it is given"
            raise AgentFailed(f"agent {settings.agent} asked the model nothing", hint=hint)
        return Trajectory(
            trajectory_id=episode.trajectory_id,
            group_id=episode.group_id,
            token_ids=(),
            loss_mask=(),
            logprobs=(),
            versions=(),
            reward=float(verdict.reward),
            is_success=verdict.is_success,
            turns=task.answers,
            invalid_turns=verdict.invalid_turns,
        )


def agent_episodes(settings: RunSettings, door: Door) -> AgentEpisodes | None:
    return AgentEpisodes(settings, door) if settings.agent is not None else None
