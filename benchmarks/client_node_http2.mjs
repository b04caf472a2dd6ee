// Node's http2 with nothing on top: the least that a client on Node can cost.

import { readFileSync } from "node:fs";
import http2 from "node:http2";
import { job, measure } from "./load.mjs";

const session = http2.connect(`https://${job.host}:${job.port}`, { ca: readFileSync(job.ca_file) });
const authorization = `bearer ${job.bearer}`;

function push({ token, apnsId, body }) {
  return new Promise((resolve, reject) => {
    const stream = session.request({
      ":method": "POST",
      ":path": `/3/device/${token}`,
      "apns-topic": job.topic,
      "apns-push-type": "alert",
      "apns-priority": "10",
      "apns-id": apnsId,
      authorization,
    });
    let status;
    stream.on("response", (headers) => (status = headers[":status"]));
    stream.on("end", () => resolve(status === 200));
    stream.on("error", reject);
    stream.resume();
    stream.end(body);
  });
}

await measure(({ payload, ...rest }) => ({ ...rest, body: JSON.stringify(payload) }), push);
session.close();
