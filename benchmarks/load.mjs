// load.py's other half, for clients on Node. What it says there holds here.

import { readFileSync } from "node:fs";

export const job = JSON.parse(readFileSync(0, "utf8"));

function pushes() {
  const made = [];
  for (let number = 0; number <= job.batch * job.batches; number++) {
    made.push({
      token: job.tokens[number % job.tokens.length],
      apnsId: `7f7af6c0-0000-4000-8000-${number.toString(16).padStart(12, "0")}`,
      payload: {
        aps: {
          alert: {
            title: `Order ${String(number).padStart(6, "0")}`,
            body: "It has left the kitchen and is on its way.",
          },
          sound: "default",
        },
      },
    });
  }
  return made;
}

function cpu() {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
}

// `prepare` makes of a push what `push` takes, before the clock runs.
export async function measure(prepare, push) {
  const [first, ...several] = pushes().map(prepare);
  if (!(await push(first))) throw new Error("the first push was not accepted");
  const cold = { cold_cpu: cpu(), cold_wall: Date.now() / 1000 - job.began };
  const cpuBefore = cpu();
  const wallBefore = performance.now();
  let accepted = 0;
  for (let at = 0; at < several.length; at += job.batch) {
    const answers = await Promise.all(several.slice(at, at + job.batch).map(push));
    accepted += answers.filter(Boolean).length;
  }
  const sending = { cpu: cpu() - cpuBefore, wall: (performance.now() - wallBefore) / 1000, accepted };
  process.stdout.write(JSON.stringify({ ...cold, ...sending }));
}
