// A hub for the dashboard's checks: two repositories, and a search that finds both.
//
// `o/several` has two GGUF files, whose sizes are told and whose bytes are never asked for. `o/one` has the file of a
// real model. Its first download drips, so that it can be cancelled; later ones are whole.

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";

const DRIP_MS = 100, DRIP_BYTES = 1 << 16, ETAG = "\"1\"";

/** A hub on a free port of this machine that has `file`. */
export async function startHub(file) {
  const whole = readFileSync(file), size = whole.length, sha256 = createHash("sha256").update(whole).digest("hex");
  const entry = (rfilename, bytes, hash) => ({ rfilename, size: bytes, lfs: { sha256: hash, size: bytes } });
  const repositories = {
    "o/several": [entry("tiny-Q4_K_M.gguf", 64 << 20, "0".repeat(64)), entry("tiny-Q8_0.gguf", 9e15, "1".repeat(64))],
    "o/one": [entry("smol-Q4_1.gguf", size, sha256)],
  };
  let drips = 1;
  const server = createServer((request, response) => {
    const url = new URL(request.url, "http://hub"), { pathname } = url;
    const json = (value) => response.setHeader("Content-Type", "application/json").end(JSON.stringify(value));
    const repository = /^\/api\/models\/(.+)$/.exec(pathname)?.[1];
    if (pathname === "/api/models") return json(Object.keys(repositories).filter((id) => id.includes(url.searchParams.get("search"))).map((id) => ({ id, downloads: 1200, likes: 3 })));
    if (repositories[repository]) return json({ id: repository, sha: "0".repeat(40), siblings: repositories[repository], cardData: { license: "mit" } });
    if (!pathname.startsWith("/o/one/resolve/")) return response.writeHead(404).end();
    const from = request.headers["if-range"] === ETAG ? Number(/^bytes=(\d+)-/.exec(request.headers.range || "")?.[1] || 0) : 0;
    if (from) response.setHeader("Content-Range", `bytes ${from}-${size - 1}/${size}`);
    response.writeHead(from ? 206 : 200, { "Content-Length": size - from, ETag: ETAG });
    if (request.method === "HEAD") return response.end();
    if (drips-- > 0) {
      let at = from;
      const timer = setInterval(() => response.write(whole.subarray(at, at += DRIP_BYTES)), DRIP_MS);
      return response.on("close", () => clearInterval(timer));
    }
    return response.end(whole.subarray(from));
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  return {
    url: `http://127.0.0.1:${server.address().port}`,
    /** Makes the next download drip. */
    drip() { drips = 1; },
    close: () => server.closeAllConnections() || server.close(),
  };
}
