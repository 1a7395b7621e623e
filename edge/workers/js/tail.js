// One line for each run of the Worker, behind a mark that only its host knows.

export default {
  tail(items, env) {
    for (const item of items) {
      const { request, response, cron } = item.event ?? {};
      const line = {
        outcome: item.outcome, method: request?.method, url: request?.url,
        status: response?.status, cron, exceptions: item.exceptions,
      };
      console.log(`${env.MARK} ${JSON.stringify(line)}`);
    }
  },
};
