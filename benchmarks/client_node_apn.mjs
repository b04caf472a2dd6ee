// @parse/node-apn as its README has it: a Notification and a token to a Provider.

import { readFileSync } from "node:fs";
import apn from "@parse/node-apn";
import { job, measure } from "./load.mjs";

const provider = new apn.Provider({
  token: { key: readFileSync(job.key_file), keyId: job.key_id, teamId: job.team_id },
  address: job.host,
  port: job.port,
  ca: [readFileSync(job.ca_file)],
  production: true,
  requestTimeout: 120000, // the last of 5,000 waits its turn for longer than the default
});

async function push({ token, apnsId, payload }) {
  const notification = new apn.Notification({
    id: apnsId,
    topic: job.topic,
    pushType: "alert",
    priority: 10,
    rawPayload: payload,
  });
  const { sent } = await provider.send(notification, token);
  return sent.length === 1;
}

await measure((each) => each, push);
provider.shutdown();
