// Node's http2 as a server, which does what its last argument says. It prints an event a line, as JSON.
// Node has an HTTP/2 engine in C of its own, nghttp2, and decides with it what is allowed.

import { readFileSync, writeSync } from "node:fs";
import http2 from "node:http2";

const [key, cert, port, story] = process.argv.slice(2);
const { NGHTTP2_INTERNAL_ERROR, NGHTTP2_NO_ERROR, NGHTTP2_REFUSED_STREAM } = http2.constants;

const tell = (event) => writeSync(1, JSON.stringify(event) + "\n");

const answer = (pushed, content = "") => {
  tell({ answered: pushed.id, connection: pushed.connection, open: pushed.open });
  pushed.stream.respond({ ":status": 200, "apns-id": pushed.id });
  pushed.stream.end(content);
};

const held = [];
const seen = new Set();
let changed = false;

const stories = {
  // Say what was heard.
  echo: (pushed) => answer(pushed, JSON.stringify({ headers: pushed.headers, body: pushed.body })),

  // One stream until the first answer, as APNs does, and then 1,000. Answers take a moment, so that streams pile up.
  onlyOneAtFirst: (pushed) =>
    setTimeout(() => {
      answer(pushed);
      if (!changed) pushed.session.settings({ maxConcurrentStreams: 1000 });
      changed = true;
    }, 20),

  // 100 streams, and when they are all taken only one; then what was begun is answered.
  lowered: (pushed) => {
    held.push(pushed);
    if (changed) {
      answer(pushed);
    } else if (held.length === 100) {
      changed = true;
      pushed.session.settings({ maxConcurrentStreams: 1 }, () => held.slice(0, 100).forEach((each) => answer(each)));
    }
  },

  // The first connection has heard 100 pushes and leaves after the 50th: the others it has not looked at.
  leaving: (pushed) => {
    if (pushed.connection > 1) return answer(pushed);
    held.push(pushed);
    if (held.length === 100) {
      const last = held[49].stream.id;
      pushed.session.goaway(NGHTTP2_NO_ERROR, last, Buffer.from('{"reason":"Shutdown"}'));
      held.slice(0, 50).forEach((each) => answer(each));
    }
  },

  // Refuses each first push whose apns-id ends in 0, and breaks each whose apns-id ends in 1.
  resetting: (pushed) => {
    const again = seen.has(pushed.id);
    seen.add(pushed.id);
    if (pushed.id.endsWith("0") && !again) return pushed.stream.close(NGHTTP2_REFUSED_STREAM);
    if (pushed.id.endsWith("1")) return pushed.stream.close(NGHTTP2_INTERNAL_ERROR);
    answer(pushed);
  },
};

const streams = { onlyOneAtFirst: 1 }[story] ?? 100;
const server = http2.createSecureServer({
  key: readFileSync(key),
  cert: readFileSync(cert),
  settings: { maxConcurrentStreams: streams },
});

let connections = 0;
server.on("session", (session) => {
  const connection = ++connections;
  let open = 0;
  session.on("goaway", (code) => tell({ goaway: code, connection }));
  session.on("frameError", (type, code, id) => tell({ fault: `frame ${type} code ${code} stream ${id}`, connection }));
  session.on("error", (fault) => tell({ fault: String(fault), connection }));
  session.on("stream", (stream, headers) => {
    const already = ++open;
    const chunks = [];
    stream.on("close", () => open--);
    stream.on("error", () => {}); // its own resets
    stream.on("data", (chunk) => chunks.push(chunk));
    stream.on("end", () =>
      stories[story]({
        id: headers["apns-id"],
        body: Buffer.concat(chunks).toString(),
        headers,
        stream,
        session,
        connection,
        open: already,
      }),
    );
  });
});
server.listen(Number(port), "127.0.0.1");
